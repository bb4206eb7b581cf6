"""Configurations for programs that use a gateway, and tools for agents that use a swarm."""
