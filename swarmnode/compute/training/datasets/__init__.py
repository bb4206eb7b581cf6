"""From a user's data to microbatches, as a pure function of (data, run, step, number)."""
