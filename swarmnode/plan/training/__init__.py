"""Decisions of a training step: who gets which microbatch, what is counted, who averages with whom."""
