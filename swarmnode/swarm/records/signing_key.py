"""An Ed25519 key that signs what a swarm's members believe: the owner's, or the one of an invite."""

from __future__ import annotations

from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarmnode.net.identity import has_signed

SEED_BYTES = 32
PUBLIC_BYTES = 32


class SigningKey:
    """A private key, and the public one that follows from it."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.seed = seed
        self.public = self._key.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"<SigningKey {self.public.hex()[:16]}>"

    @classmethod
    def generate(cls) -> SigningKey:
        """A new one."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    def sign(self, data: bytes) -> bytes:
        """The 64-byte signature."""
        return self._key.sign(data)


def is_signed(public: bytes, data: bytes, signature: bytes) -> bool:
    """Whether the key with these 32 public bytes made the signature over the data; False for what is no key."""
    key = _public_key(public)
    return key is not None and has_signed(key, data, signature)


@lru_cache(maxsize=256)
def _public_key(public: bytes) -> Ed25519PublicKey | None:
    return Ed25519PublicKey.from_public_bytes(public) if len(public) == PUBLIC_BYTES else None
