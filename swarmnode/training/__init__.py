"""The user's side of a training: settings and data, feeding a swarm, or training in this process."""
