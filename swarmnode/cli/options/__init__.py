"""What several commands share: options of metrics and logs, the owner's key, the planned model."""
