"""What is stored on this machine: keys, invites, checkpoints and training states."""
