"""The version of this package, where all its parts can read it."""

__version__ = "0.1.0"
