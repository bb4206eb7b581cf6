"""Checks for problems that may keep a machine from taking part in a swarm."""
