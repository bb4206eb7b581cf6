"""Signed records: a msgpack body and the signature over it. Any peer may pass a record on, and no peer can change it.

Each kind has a domain, which precedes the body under the signature, so that no kind can be taken for another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from swarmnode.codec.body import DECODE_ERRORS, first_broken
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.net.identity import SigningKey, has_signed
from swarmnode.net.interfaces import PeerId

PUBLIC_BYTES, SIGNATURE_BYTES = 32, 64

Sign = Callable[[bytes], bytes]

Verify = Callable[[PeerId, bytes, bytes], bool]
"""Function of (peer id, data, signature) that returns whether the peer's key made the signature over the data."""


def is_signed(public: bytes, data: bytes, signature: bytes) -> bool:
    """Return whether the key with these 32 public bytes made the signature over the data; False if they are no key."""
    key = _public_key(public)
    return key is not None and has_signed(key, data, signature)


@lru_cache(maxsize=256)
def _public_key(public: bytes) -> Ed25519PublicKey | None:
    return Ed25519PublicKey.from_public_bytes(public) if len(public) == PUBLIC_BYTES else None


class Signable(msgspec.Struct, array_like=True, frozen=True):
    """Content of a signed record. Bounds of single fields are in their types, which msgspec checks while decoding."""

    def rules(self) -> dict[str, bool]:
        """Return the rules that types cannot express, by name, with whether the content keeps them; empty if there are
        none."""
        return {}


class _OfSwarm(Protocol):
    __struct_fields__: ClassVar[tuple[str, ...]]

    @property
    def swarm(self) -> bytes: ...

    def rules(self) -> dict[str, bool]: ...


Content = TypeVar("Content", bound=_OfSwarm)


class Signed(msgspec.Struct, array_like=True, frozen=True):
    """A body as its author encoded it, and the author's signature over domain and body."""

    body: bytes
    signature: bytes


Envelope = TypeVar("Envelope", bound=Signed)

_signed_decoder = msgspec.msgpack.Decoder(Signed)


class SignedRecord(Generic[Content]):
    """Kind of signed record, of at most `max_bytes`."""

    def __init__(self, name: str, content: type[Content], *, domain: bytes, max_bytes: int) -> None:
        self.name = name
        self._a = f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
        self._domain = domain
        self._max_bytes = max_bytes
        self._fields = content.__struct_fields__
        self._decoder = msgspec.msgpack.Decoder(content)

    def check(self, content: Content) -> None:
        """Raise ValueError if a content to be signed is out of its bounds, which is a bug of the caller."""
        try:
            self._decode(msgspec.msgpack.encode(content))
        except DECODE_ERRORS as error:
            raise ValueError(f"{self.name} not valid: {self._explain(error)}") from None

    def enveloped(self, content: Content, sign: Sign) -> Signed:
        """Encode `content`, sign it by `sign`, and return both."""
        body = msgspec.msgpack.encode(content)
        return Signed(body, sign(self._domain + body))

    def read(self, raw: bytes, decoder: msgspec.msgpack.Decoder[Envelope], max_bytes: int) -> Envelope:
        """Decode the envelope in untrusted bytes. Raises ProtocolError if it is too large or damaged."""
        if len(raw) > max_bytes:
            raise self.too_large(raw)
        try:
            return decoder.decode(raw)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"bad {self.name}: {error}") from None

    def too_large(self, raw: bytes) -> ProtocolError:
        """Return the error for a record that is too large."""
        return ProtocolError(f"{self._a} of {len(raw)} bytes", code=ErrorCode.TOO_LARGE)

    def _read(self, raw: bytes) -> Signed:
        return self.read(raw, _signed_decoder, self._max_bytes)

    def _decode(self, body: bytes) -> Content:
        content = self._decoder.decode(body)
        broken = first_broken(content.rules())
        if broken is not None:
            raise msgspec.ValidationError(broken)
        return content

    def _content(self, signed: Signed) -> Content:
        try:
            return self._decode(signed.body)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"bad {self.name}: {self._explain(error)}") from None

    def _explain(self, error: Exception) -> str:
        """Replace the field number in an msgspec error by the field's name."""
        return re.sub(r"\$\[(\d+)\]", lambda found: self._fields[int(found[1])], str(error))

    def _check_swarm(self, content: Content, swarm: bytes, author: PeerId | None) -> None:
        if content.swarm != swarm:
            raise ProtocolError(f"this {self.name} is of another swarm", code=ErrorCode.WRONG_SWARM, peer=author)


class OwnerSigned(SignedRecord[Content]):
    """Kind of record that the owner of a swarm signs."""

    def sign(self, content: Content, owner: SigningKey) -> bytes:
        """Return the signed bytes to hand out. Raises ValueError if the content is out of its bounds, which is a bug of
        the caller."""
        self.check(content)
        raw = msgspec.msgpack.encode(self.enveloped(content, owner.sign))
        assert len(raw) <= self._max_bytes, "the bounds see to that"
        return raw

    def open(self, raw: bytes, swarm: bytes, owner: bytes) -> Content:
        """Return the content of these bytes. Raises ProtocolError if this owner did not sign it for this swarm."""
        signed = self._read(raw)
        content = self._content(signed)
        self._check_swarm(content, swarm, None)
        if not is_signed(owner, self._domain + signed.body, signed.signature):
            raise ProtocolError(f"the owner did not sign this {self.name}", code=ErrorCode.REFUSED)
        return content


class PeerSigned(SignedRecord[Content]):
    """Kind of record that peers sign with their own keys. `author` is the field that names the peer."""

    def __init__(self, name: str, content: type[Content], *, domain: bytes, max_bytes: int, author: str) -> None:
        super().__init__(name, content, domain=domain, max_bytes=max_bytes)
        self._author = author

    def sign(self, content: Content, sign: Sign) -> bytes:
        """Return the bytes of a content signed by its author."""
        return msgspec.msgpack.encode(self.enveloped(content, sign))

    def open(self, raw: bytes, swarm: bytes | None, verify: Verify) -> Content:
        """Return the content of these bytes; `swarm` None accepts any swarm. Raises ProtocolError if its author did not
        sign it."""
        return self.verified(self._read(raw), swarm, verify)

    def verified(self, signed: Signed, swarm: bytes | None, verify: Verify) -> Content:
        """Return the content of an envelope. Raises ProtocolError as `open` does."""
        content = self._content(signed)
        author: PeerId = getattr(content, self._author)
        if swarm is not None:
            self._check_swarm(content, swarm, author)
        if not verify(author, self._domain + signed.body, signed.signature):
            raise ProtocolError(f"the signature of this {self.name} is false", code=ErrorCode.REFUSED, peer=author)
        return content
