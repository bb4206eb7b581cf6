"""What a swarm in training keeps: its states on disk, given to peers, fetched from them, exported as a checkpoint."""
