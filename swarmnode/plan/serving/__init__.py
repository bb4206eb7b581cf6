"""What a stage computes next for its sessions."""
