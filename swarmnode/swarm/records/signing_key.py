"""Ed25519 keys that sign what a swarm's members believe: the owner's, or the one of an invite."""

from __future__ import annotations

from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from swarmnode.net.identity import SigningKey as SigningKey
from swarmnode.net.identity import has_signed

SEED_BYTES = 32
PUBLIC_BYTES = 32


def is_signed(public: bytes, data: bytes, signature: bytes) -> bool:
    """Whether the key with these 32 public bytes made the signature over the data; False for what is no key."""
    key = _public_key(public)
    return key is not None and has_signed(key, data, signature)


@lru_cache(maxsize=256)
def _public_key(public: bytes) -> Ed25519PublicKey | None:
    return Ed25519PublicKey.from_public_bytes(public) if len(public) == PUBLIC_BYTES else None
