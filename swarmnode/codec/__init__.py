"""Wire format of messages: frame header, msgpack bodies, tensor descriptors. No torch, no asyncio."""
