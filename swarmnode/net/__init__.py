"""Peers and byte streams between them. This room knows nothing of models."""
