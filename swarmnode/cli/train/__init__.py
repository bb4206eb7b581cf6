"""Commands for training a swarm's model."""
