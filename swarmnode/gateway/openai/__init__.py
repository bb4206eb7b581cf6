"""The API of OpenAI and its clients, with what vLLM adds to it."""
