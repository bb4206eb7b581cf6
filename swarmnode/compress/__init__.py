"""Tensors to payloads and back: `codecs.encode` and `codecs.decode`."""
