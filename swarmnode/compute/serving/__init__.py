"""Many sessions in one forward pass: caches, schedule, run, sampling."""
