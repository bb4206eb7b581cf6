"""Files on this machine: keys, invites, checkpoints and training states."""
