"""Limits on one peer's, or one address group's, use of this peer: places and pace."""
