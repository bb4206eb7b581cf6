"""Clients of a swarm: they ask, observe, own or train it, and read the model's small files."""
