"""The arithmetic by which replicas come to one gradient, or to one set of parameters."""
