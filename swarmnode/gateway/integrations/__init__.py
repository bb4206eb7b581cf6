"""Programs that use a gateway or a swarm: what each wants to be told."""
