"""HTTP gateway: serves swarms through the APIs of OpenAI, Anthropic and vLLM, for tools that know those."""
