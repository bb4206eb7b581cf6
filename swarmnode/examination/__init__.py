"""What may keep a machine from taking part, looked at before it tries."""
