"""A training worker: the units that a node trains, and the microbatches in flight at it."""
