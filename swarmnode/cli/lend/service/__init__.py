"""`swarmnode service`: a node that starts with the machine, as a unit of the user's own systemd."""
