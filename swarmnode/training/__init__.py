"""Training by a swarm: the coordinator, the workers' stages, the averaging of replicas, the spot checks, and the trainer
that feeds them."""
