"""Placement: which units a peer should hold, and what the swarm's throughput gains by it."""
