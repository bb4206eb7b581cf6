"""A part of a model: its checkpoint, its family, and how it is built and checked."""
