"""What one peer, or one address group, may take of this peer's: places, and pace."""
