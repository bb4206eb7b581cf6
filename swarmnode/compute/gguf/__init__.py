"""Models in GGUF files: reading them, and writing them from a checkpoint."""
