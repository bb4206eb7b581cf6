"""Directory: the peers that are in the swarm now, and how this peer learns of them."""
