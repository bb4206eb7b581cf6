"""Commands of who hosts a swarm."""
