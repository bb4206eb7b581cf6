"""Simulated training: microbatches, the all-reduce at the end of a step, and the rule for choosing layers."""
