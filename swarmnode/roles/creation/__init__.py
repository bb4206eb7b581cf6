"""Creating a swarm: from a checkpoint, a config or a module to a manifest and an invite."""
