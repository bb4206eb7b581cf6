"""What asks a swarm: clients of all kinds, and what they have of its model."""
