"""Spot checks: microbatches computed once more by replicas, and what follows for who was false."""
