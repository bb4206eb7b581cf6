"""The API of Anthropic and its clients."""
