"""A part of a model: its checkpoint, its family, and code that builds and checks it."""
