"""Pure decisions over a frozen view of the swarm: which layers to hold, whom to send to. No clock, socket or tensor."""
