"""`swarmnode demo`: a swarm on this machine, from nothing to text, through the death of a node."""
