"""Losses of language models: of the next token, and of the routers of mixtures of experts."""
