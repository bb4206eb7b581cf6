"""Tensors on this machine: devices, checkpoints, spans of a model, their caches and the runner. Independent of peers."""
