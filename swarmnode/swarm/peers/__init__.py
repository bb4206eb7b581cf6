"""The directory: who is in the swarm now, and how that is found out."""
