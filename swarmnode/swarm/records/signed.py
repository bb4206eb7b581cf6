"""A body of msgpack and the signature over it: what anybody may pass on and nobody change.

Each kind has a domain that goes before the body under the signature, so that no kind can be taken for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import msgspec

from swarmnode.codec.decoding import DECODE_ERRORS
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.signing_key import SigningKey, is_signed

Sign = Callable[[bytes], bytes]
Verify = Callable[[PeerId, bytes, bytes], bool]
"""(peer id, data, signature) -> whether the peer's key made the signature over the data"""


class _OfSwarm(Protocol):
    @property
    def swarm(self) -> bytes: ...


Content = TypeVar("Content", bound=_OfSwarm)


class Signed(msgspec.Struct, array_like=True, frozen=True):
    """A body as its author encoded it, and the author's signature over domain and body."""

    body: bytes
    signature: bytes


Envelope = TypeVar("Envelope", bound=Signed)

_signed_decoder = msgspec.msgpack.Decoder(Signed)


class OwnerSigned(Generic[Content]):
    """One kind of what the owner signs. `rules` says of a content, rule by rule, whether it keeps its bounds."""

    def __init__(
        self,
        name: str,
        content: type[Content],
        *,
        domain: bytes,
        max_bytes: int,
        rules: Callable[[Content], Mapping[str, bool]],
    ) -> None:
        self.name = name
        self._domain = domain
        self._max_bytes = max_bytes
        self._rules = rules
        self._decoder = msgspec.msgpack.Decoder(content)

    def __repr__(self) -> str:
        return f"<OwnerSigned {self.name} of up to {self._max_bytes} bytes>"

    def sign(self, content: Content, owner: SigningKey) -> bytes:
        """The bytes to give out. Raises ValueError where the content breaks a rule of its own: a bug of the caller."""
        broken = first_broken(self._rules(content))
        if broken is not None:
            raise ValueError(f"{self.name} not valid: {broken}")
        body = msgspec.msgpack.encode(content)
        raw = msgspec.msgpack.encode(Signed(body, owner.sign(self._domain + body)))
        assert len(raw) <= self._max_bytes, "the rules see to that"
        return raw

    def open(self, raw: bytes, swarm: bytes, owner: bytes) -> Content:
        """The content of these bytes, if this owner signed it for this swarm. Raises ProtocolError."""
        if len(raw) > self._max_bytes:
            raise ProtocolError(f"a {self.name} of {len(raw)} bytes", code=ErrorCode.TOO_LARGE)
        try:
            signed = _signed_decoder.decode(raw)
            content = self._decoder.decode(signed.body)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"bad {self.name}: {error}") from None
        broken = first_broken(self._rules(content))
        if broken is not None:
            raise ProtocolError(f"bad {self.name}: {broken}")
        if content.swarm != swarm:
            raise ProtocolError(f"a {self.name} of another swarm", code=ErrorCode.WRONG_SWARM)
        if not is_signed(owner, self._domain + signed.body, signed.signature):
            raise ProtocolError(f"a {self.name} that the owner did not sign", code=ErrorCode.REFUSED)
        return content


class PeerSigned(Generic[Content]):
    """One kind of what peers sign with keys of their own. `author` says of a content whose it is, `rules` as for OwnerSigned."""

    def __init__(
        self,
        name: str,
        content: type[Content],
        *,
        domain: bytes,
        rules: Callable[[Content], Mapping[str, bool]],
        author: Callable[[Content], PeerId],
    ) -> None:
        self.name = name
        self._a = f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
        self._domain = domain
        self._rules = rules
        self._author = author
        self._decoder = msgspec.msgpack.Decoder(content)

    def __repr__(self) -> str:
        return f"<PeerSigned {self.name}>"

    def sign(self, content: Content, sign: Sign) -> Signed:
        """What its author gives out."""
        body = msgspec.msgpack.encode(content)
        return Signed(body, sign(self._domain + body))

    def read(self, raw: bytes, max_bytes: int) -> Signed:
        """The body and its signature, of which nothing is known yet. Raises ProtocolError."""
        return self.decode(raw, _signed_decoder, max_bytes)

    def decode(self, raw: bytes, decoder: msgspec.msgpack.Decoder[Envelope], max_bytes: int) -> Envelope:
        """As `read`, of an envelope in which there is more."""
        if len(raw) > max_bytes:
            raise self.too_large(raw)
        try:
            return decoder.decode(raw)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"bad {self.name}: {error}") from None

    def too_large(self, raw: bytes) -> ProtocolError:
        """It has more bytes than it may."""
        return ProtocolError(f"{self._a} of {len(raw)} bytes", code=ErrorCode.TOO_LARGE)

    def open(self, signed: Signed, swarm: bytes | None, verify: Verify) -> Content:
        """The content, if its author signed it for this swarm (None: for any). Raises ProtocolError."""
        try:
            content = self._decoder.decode(signed.body)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"bad {self.name}: {error}") from None
        author, broken = self._author(content), first_broken(self._rules(content))
        if broken is not None:
            raise ProtocolError(f"bad {self.name}: {broken}", peer=author)
        if swarm is not None and content.swarm != swarm:
            raise ProtocolError(f"{self._a} of another swarm", code=ErrorCode.WRONG_SWARM, peer=author)
        if not verify(author, self._domain + signed.body, signed.signature):
            raise ProtocolError(f"{self._a} with a false signature", code=ErrorCode.REFUSED, peer=author)
        return content


def first_broken(rules: Mapping[str, bool]) -> str | None:
    """The first rule that is not kept, or None."""
    return next((rule for rule, kept in rules.items() if not kept), None)
