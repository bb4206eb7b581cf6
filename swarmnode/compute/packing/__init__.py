"""Weights in packed formats, of GGUF and of quantised checkpoints: their places in files, their values, and their products."""
