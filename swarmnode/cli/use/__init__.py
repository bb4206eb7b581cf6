"""Commands of who uses a swarm."""
