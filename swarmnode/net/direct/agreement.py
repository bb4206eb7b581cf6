"""What two peers agree on before they connect directly: X25519 (RFC 7748) over a stream that knows both, and HKDF (RFC 5869).

Nothing that is derived is ever sent over that stream, so whoever shows the token has the secret, and who answers it, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import PeerId

PUBLIC_KEY_BYTES = 32
TOKEN_BYTES = 16
KEY_BYTES = 32
LABEL = b"swarmnode direct 1"


@dataclass(frozen=True)
class Occasion:
    """What a connection is for: a stream of `protocol` that `opener` opens to `acceptor`."""

    opener: PeerId
    acceptor: PeerId
    protocol: str


@dataclass(frozen=True, repr=False)
class Agreement:
    """Secrets of one connection. The opener shows `token`, the acceptor answers with `welcome`, once each."""

    token: bytes
    welcome: bytes
    opener_key: bytes  # what the opener sends is sealed with it
    acceptor_key: bytes


class KeyPair:
    """An ephemeral key of one side, for one agreement."""

    def __init__(self, private: bytes | None = None) -> None:
        self._private = X25519PrivateKey.generate() if private is None else X25519PrivateKey.from_private_bytes(private)
        self.public: bytes = self._private.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"<KeyPair {self.public.hex()}>"

    def as_opener(self, acceptor_public: bytes, occasion: Occasion) -> Agreement:
        """Agree with the acceptor. Raises ProtocolError on a key that makes no secret."""
        return self._agree(acceptor_public, occasion, self.public + acceptor_public)

    def as_acceptor(self, opener_public: bytes, occasion: Occasion) -> Agreement:
        """Agree with the opener. Raises ProtocolError on a key that makes no secret."""
        return self._agree(opener_public, occasion, opener_public + self.public)

    def _agree(self, theirs: bytes, occasion: Occasion, both_public: bytes) -> Agreement:
        try:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError as error:  # a point of low order
            raise ProtocolError(f"a public key that makes no secret: {error}") from error
        names = "\0".join((occasion.opener, occasion.acceptor, occasion.protocol)).encode()
        info = b"\0".join((LABEL, names, both_public))
        derived = HKDF(SHA256(), 2 * TOKEN_BYTES + 2 * KEY_BYTES, salt=None, info=info).derive(secret)
        keys_at = 2 * TOKEN_BYTES
        return Agreement(
            token=derived[:TOKEN_BYTES],
            welcome=derived[TOKEN_BYTES:keys_at],
            opener_key=derived[keys_at : keys_at + KEY_BYTES],
            acceptor_key=derived[keys_at + KEY_BYTES :],
        )
