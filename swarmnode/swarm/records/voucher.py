"""The voucher: a node lends its credit to a client of the same owner, signed by the node (`protocol/records.md`)."""

from __future__ import annotations

import msgspec

from swarmnode.codec.credit_messages import MAX_RECEIPT_BYTES
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import MAX_PEER_CHARS
from swarmnode.swarm.records.signed import PeerSigned, Sign, Verify

DOMAIN = b"swarmnode voucher 1\n"
MAX_VOUCHER_S = 86_400


class Voucher(msgspec.Struct, array_like=True, frozen=True):
    """What `worker` is credited counts for `client` `until` then (unix time, seconds)."""

    swarm: bytes
    worker: PeerId
    client: PeerId
    until: int

    def __repr__(self) -> str:
        return f"<Voucher of {self.worker[-8:]} for {self.client[-8:]}>"


def _rules(voucher: Voucher) -> dict[str, bool]:
    """What each field must keep to, and whether it does."""
    return {
        "worker": 0 < len(voucher.worker) <= MAX_PEER_CHARS,
        "client": 0 < len(voucher.client) <= MAX_PEER_CHARS,
        "until": voucher.until > 0,
    }


_KIND = PeerSigned("voucher", Voucher, domain=DOMAIN, rules=_rules, author=lambda voucher: voucher.worker)


def sign_voucher(voucher: Voucher, sign: Sign) -> bytes:
    """The bytes for the client to show."""
    return msgspec.msgpack.encode(_KIND.sign(voucher, sign))


def open_voucher(raw: bytes, swarm: bytes, verify: Verify, now: float) -> Voucher:
    """The voucher in these bytes, where it holds at `now`. Raises ProtocolError."""
    voucher = _KIND.open(_KIND.read(raw, MAX_RECEIPT_BYTES), swarm, verify)
    if not 0 <= voucher.until - now <= MAX_VOUCHER_S:
        raise ProtocolError("a voucher of another time", code=ErrorCode.REFUSED, peer=voucher.client)
    return voucher
