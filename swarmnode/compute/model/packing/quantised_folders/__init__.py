"""Quantised checkpoints of safetensors whose weights stay packed: their tensors, their products and their places in a model."""
