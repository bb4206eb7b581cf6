"""Bytes to messages and back: frame header, msgpack bodies, tensor descriptors. No torch, no asyncio."""
