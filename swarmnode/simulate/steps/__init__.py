"""Simulated training: microbatches, and the end of a step."""
