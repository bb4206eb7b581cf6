"""The demo (`swarmnode demo`): a swarm on this machine is founded, learns a text, loses a node, and recites the text."""
