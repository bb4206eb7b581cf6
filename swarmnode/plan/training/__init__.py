"""Decisions of a training step: the route of each microbatch, the counts per replica, and the groups that average."""
