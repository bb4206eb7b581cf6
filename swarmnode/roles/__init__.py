"""Conversations: net + swarm + plan + compute."""
