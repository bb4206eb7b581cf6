"""Tuning of adapters as users start it: with a swarm, or in this process."""
