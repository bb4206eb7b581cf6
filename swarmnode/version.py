"""Version of this package, importable from every part of it."""

__version__ = "0.1.0"
