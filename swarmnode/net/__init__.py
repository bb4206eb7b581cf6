"""Peers and byte streams. Knows nothing of models."""
