"""A user's data as microbatches, as a pure function of (data, run, step, number)."""
