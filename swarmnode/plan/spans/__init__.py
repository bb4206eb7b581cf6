"""Placement: which layers a peer should hold, and what the swarm's throughput gains by it."""
