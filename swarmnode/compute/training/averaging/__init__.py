"""Arithmetic that gives all replicas one gradient, or one set of parameters."""
