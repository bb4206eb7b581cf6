"""Commands for users of a swarm."""
