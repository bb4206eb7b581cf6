"""Record of an adapter that a member brings into a swarm, signed with the key of the member's home folder.

Format: `protocol/records.md`. The record travels with the OPEN of each session that uses the adapter, so a hop needs no list of
adapters. Records of shared adapters are also in the DHT, where other members find their names.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta

from swarmnode.codec.body import MAX_ADAPTER_CHARS, MAX_ADAPTER_RECORD_BYTES, Root
from swarmnode.codec.messages import AdapterTicket, Open
from swarmnode.codec.training_messages import Peer
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.invite import MAX_SKEW_S, SwarmId, UnixTime
from swarmnode.swarm.records.manifest import (
    MAX_CHAT_BYTES,
    MAX_CONFIG_BYTES,
    MAX_WEIGHTS_BYTES,
    AdapterInfo,
    file_names,
    is_adapter_name,
)
from swarmnode.swarm.records.signed import PeerSigned, Sign, Signable, Verify
from swarmnode.swarm.storage.content import HASH_BYTES, FileContent

DOMAIN = b"swarmnode adapter 1\n"
TICKET_DOMAIN = b"swarmnode adapter ticket 1\n"
DAY_S = 86_400
MAX_LIFE_S = 90 * DAY_S
TICKET_S = 300.0  # how old a ticket may be when a hop reads it
SLOTS = 16  # shared adapters of one owner
MAX_RANK = 4096


class Share(IntEnum):
    """Peers that may use an adapter. A code that is not known counts as PRIVATE."""

    PRIVATE = 0  # its owner alone
    MEMBERS = 1  # every peer that the swarm admits
    ALL = 2  # these, and the users of their gateways


class AdapterRecord(Signable, frozen=True, dict=True):
    """Adapter of `owner`, the id of the key of the owner's home folder. Sizes are in bytes, times are unix seconds."""

    swarm: SwarmId
    owner: Peer
    name: Annotated[str, Meta(min_length=1, max_length=MAX_ADAPTER_CHARS)]
    share: Annotated[int, Meta(ge=0, le=255)]
    rank: Annotated[int, Meta(ge=1, le=MAX_RANK)]  # the largest one
    config_size: Annotated[int, Meta(ge=1, le=MAX_CONFIG_BYTES)]
    config_root: Root
    weights_size: Annotated[int, Meta(ge=1, le=MAX_WEIGHTS_BYTES)]
    weights_root: Root
    issued_at: UnixTime
    expires_at: UnixTime
    slot: Annotated[int, Meta(ge=0, lt=SLOTS)] = 0  # place among the owner's shared adapters
    chat_size: Annotated[int, Meta(ge=0, le=MAX_CHAT_BYTES)] = (
        0  # of the template of its chats; 0: the model's own is used
    )
    chat_root: Annotated[bytes, Meta(max_length=HASH_BYTES)] = b""

    def __repr__(self) -> str:
        return f"<AdapterRecord {self.name} {self.id[:8]} of {self.owner[-8:]}, {self.allows.name.lower()}>"

    def rules(self) -> dict[str, bool]:
        return {
            "name": is_adapter_name(self.name),
            "chat": len(self.chat_root) == (HASH_BYTES if self.chat_size else 0),
            "times": self.issued_at < self.expires_at <= self.issued_at + MAX_LIFE_S,
        }

    @property
    def allows(self) -> Share:
        """Peers that may use the adapter, as this version understands it."""
        return Share(self.share) if self.share in Share._value2member_map_ else Share.PRIVATE

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return self.config_size + self.weights_size + self.chat_size

    @cached_property
    def id(self) -> str:
        """SHA-256 of swarm, owner, config and weights, as 64 hexadecimal digits. A new name, share, time or chat template does not
        change it."""
        files = (self.config_size, self.config_root, self.weights_size, self.weights_root)
        return hashlib.sha256(DOMAIN + msgspec.msgpack.encode((self.swarm, self.owner, *files))).hexdigest()

    @cached_property
    def info(self) -> AdapterInfo:
        """The adapter as an entry of a manifest has it, with the id as its name."""
        config, weights, _ = file_names(self.id)
        chat = f"adapter-{self.id}-{self.chat_root.hex()[:16]}.chat"  # the same adapter may get another one
        return AdapterInfo(
            self.id,
            FileContent(config, self.config_size, self.config_root),
            FileContent(weights, self.weights_size, self.weights_root),
            FileContent(chat, self.chat_size, self.chat_root) if self.chat_size else UNSET,
        )

    def check_times(self, now: float) -> None:
        """Raise ProtocolError if the record has expired at unix time `now`, or was issued later."""
        if self.expires_at <= now:
            raise ProtocolError("the adapter has expired", code=ErrorCode.ADAPTER_EXPIRED)
        if self.issued_at > now + MAX_SKEW_S:
            raise ProtocolError("the adapter's record lies in the future; is a clock wrong?")


_KIND = PeerSigned("adapter record", AdapterRecord, domain=DOMAIN, max_bytes=MAX_ADAPTER_RECORD_BYTES, author="owner")
sign_adapter, open_adapter = _KIND.sign, _KIND.open


def signed_ticket(
    opened: Open, raw: bytes, record: AdapterRecord, sign: Sign, client: PeerId, now: float
) -> AdapterTicket:
    """Return the ticket of a session with a private adapter: its signed record `raw`, and the signature of the owner's key over
    this OPEN of the peer `client`."""
    return AdapterTicket(raw, int(now), client, sign(_entitled(opened, record, client, int(now))))


def admitted_record(opened: Open, sender: PeerId, swarm: bytes, verify: Verify, now: float) -> AdapterRecord:
    """Return the record in the ticket of an OPEN that came from `sender`, after a check of all signatures and times.

    Raises ProtocolError: INVALID_REQUEST if there is no ticket, or it is for another adapter; ADAPTER_EXPIRED if the adapter's
    time is over; ADAPTER_PRIVATE if the adapter is private and its owner did not sign this OPEN of this client, for this route,
    within TICKET_S.
    """
    ticket = opened.ticket
    if ticket is None:
        raise ProtocolError("the swarm has no such adapter", code=ErrorCode.INVALID_REQUEST)
    record = open_adapter(ticket.record, swarm, verify)
    if record.id != opened.adapter:
        raise ProtocolError("its ticket is for another adapter", code=ErrorCode.INVALID_REQUEST)
    record.check_times(now)
    if record.allows is Share.PRIVATE:
        in_time = abs(now - ticket.at) <= TICKET_S
        from_client = opened.index > 0 or ticket.client == sender  # later hops have the sender in the route
        signed = _entitled(opened, record, ticket.client, ticket.at)
        if not in_time or not from_client or not verify(record.owner, signed, ticket.signature):
            raise ProtocolError("the adapter is private to another member", code=ErrorCode.ADAPTER_PRIVATE)
    return record


def _entitled(opened: Open, record: AdapterRecord, client: PeerId, at: int) -> bytes:
    """Return the bytes that the owner of a private adapter signs. They are of no use to a hop that keeps them, since they name the
    client, the session and the route."""
    route = msgspec.msgpack.encode([(hop.peer, hop.start, hop.end) for hop in opened.route])
    entitled = (record.swarm, record.id, client, opened.session, opened.epoch, at, hashlib.sha256(route).digest())
    return TICKET_DOMAIN + msgspec.msgpack.encode(entitled)
