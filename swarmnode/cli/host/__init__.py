"""Commands for hosting a swarm."""
