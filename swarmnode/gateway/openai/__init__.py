"""OpenAI's API, with vLLM's additions."""
