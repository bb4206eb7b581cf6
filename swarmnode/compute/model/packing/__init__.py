"""Weights in the packed formats of GGUF: their places in files, and their products."""
