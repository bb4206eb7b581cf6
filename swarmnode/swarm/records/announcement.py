"""Announcement: a peer's description of itself, signed with its own key (`protocol/records.md`).

In the DHT a record is the msgpack array [body, signature], in a private swarm [body, signature, certificate]. The
signature is over `DOMAIN || body`, by the key of the peer that the body names. The body has the swarm's id, so a record
cannot be moved to another swarm; its own times, so it cannot live longer than its author wanted; and a sequence number,
so an older record cannot replace it.

Sections of an announcement, each filled by the part of the node that knows its fields.

A field that a section leaves UNSET keeps its announced value. On the wire an announcement is one flat array:
names and nesting would take bytes that round trips need.

Trust: a user's condition on the peers that may compute, by what they announce.
"""

from __future__ import annotations

import hashlib
import ipaddress
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, Union

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from swarmnode.errors import UsageError
from swarmnode.net.addressing.addresses import ip_of
from swarmnode.net.addressing.reachability import Reachability
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.signed import PeerSigned, Sign, Signable, Signed, Verify

VERSION = 1
DOMAIN = b"swarmnode announcement 1\n"
MAX_RECORD_BYTES = 1024  # without the certificate
MAX_CERTIFICATE_BYTES = 512
MAX_BODY_BYTES = MAX_RECORD_BYTES - 70  # the signature has 64, the array around both 6
MAX_PEER_CHARS = 128
MAX_NAME_CHARS = 32
MAX_DEVICE_CHARS = 48
MAX_FORMAT_CHARS = 24
MAX_ADDRESSES = 4
MAX_ADDRESS_CHARS = 96
MAX_RTTS = 12
MAX_UNIT_TIMES = 8
MAX_PATHS = 8
DIGEST_BYTES = 8
MAX_UNITS = 4096
MAX_PARALLEL_SPEEDUP = 16.0  # of the cards in the largest machines; more is not believed
MAX_CODECS = 16
MAX_CODEC = 255
MAX_ANNOUNCED_DRAFTS = 255
MAX_DRAFT_MODEL_CHARS = 48
MAX_BITS_BYTES = 8
COORDINATE_NUMBERS = 5
MAX_COORDINATE = 1 << 20  # 105 s in steps of 0.1 ms: far beyond any round trip
REMEMBERED_RECORDS = 1024
MAX_LIFE_S = 600.0
MAX_SKEW_S = 10.0


Figure = Annotated[float, Meta(ge=0, lt=1e18)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Address = Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)]
PeerDigest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
CodecNumber = Annotated[int, Meta(ge=0, le=MAX_CODEC)]
Measured = Annotated[int, Meta(ge=0, lt=1 << 32)]
BitsClass = Annotated[bytes, Meta(max_length=MAX_BITS_BYTES)]
"""Class of equal bits: a hash of what a span computes of a fixed input; empty if a position's bits depend on its company"""


class State(IntEnum):
    """Phase of a peer's life. A reader treats an unknown state as OFFLINE."""

    JOINING = 0  # claims its span, may still choose another
    LOADING = 1  # will hold its span soon
    READY = 2
    DRAINING = 3  # finishes its sessions, takes nothing new
    OFFLINE = 4  # goodbye
    PAUSED = 5  # holds nothing at the moment, and will come back


class Announcement(Signable, frozen=True):
    """A peer's description of itself. Newer versions append fields; missing trailing fields have their defaults.

    `addresses` are multiaddrs without the /p2p/ part, which is `peer`. `rtt_us` maps `peer_digest` of a few other peers
    to the measured round trip in microseconds. `coordinate` is that of `links/link_statistics.py`: x, y, z and
    height in steps of 0.1 ms, then the error in percent; empty if there is none yet.
    """

    version: Annotated[int, Meta(ge=VERSION)]
    swarm: bytes
    peer: Annotated[str, Meta(min_length=1, max_length=MAX_PEER_CHARS)]
    sequence: Count  # grows with every record of this peer, over restarts too
    issued_at: float  # unix time, seconds
    expires_at: float
    started_at: Figure  # start of this run of the peer
    state: int = State.JOINING
    span: tuple[int, int] = (0, 0)  # units [i, j) that the peer computes
    seeds: tuple[int, int] = (0, 0)  # units [i, j) whose weights it can give to other peers
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] = ""
    device: Annotated[str, Meta(max_length=MAX_DEVICE_CHARS)] = ""
    decode_units_per_s: Figure = 0.0  # one position of one session through one unit
    prefill_units_per_s: Figure = 0.0  # the same inside long prompt chunks
    cache_tokens_free: Count = 0
    memory_bytes: Count = 0
    up_bps: Figure = 0.0
    down_bps: Figure = 0.0
    sessions: Count = 0
    codecs: Annotated[tuple[int, ...], Meta(max_length=MAX_CODECS)] = (0,)
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)] = ()
    rtt_us: Annotated[dict[PeerDigest, Measured], Meta(max_length=MAX_RTTS)] = field(default_factory=dict)
    training_step: Count = 0  # of a swarm in training: the present step of the peer
    sends: Annotated[dict[PeerDigest, CodecNumber], Meta(max_length=MAX_RTTS)] = field(default_factory=dict)
    """Codecs of the values for other stages, by the digest of the receiving peer; without those that are NONE."""
    training_units_per_s: Figure = 0.0  # one position through one unit, forward and backward
    coordinate: tuple[Annotated[int, Meta(ge=-MAX_COORDINATE, le=MAX_COORDINATE)], ...] = ()
    reachability: Count = Reachability.UNKNOWN
    unit_us: Annotated[dict[PeerDigest, Measured], Meta(max_length=MAX_UNIT_TIMES)] = field(default_factory=dict)
    """Time per unit of a few peers, by digest, measured while this peer used them."""
    number_format: Annotated[str, Meta(max_length=MAX_FORMAT_CHARS)] = ""  # of its computing: bfloat16, bfloat16-nf4
    left: tuple[int, int] = (0, 0)  # units held until now, whose keys get this record once more
    backup_bytes: Count = 0  # disk space offered for training states of other peers
    parallel_speedup: Annotated[float, Meta(ge=1, le=MAX_PARALLEL_SPEEDUP)] = 1.0
    """Decode speed of several sessions together, in multiples of the speed of a single session."""
    path_kbps: Annotated[dict[PeerDigest, Measured], Meta(max_length=MAX_PATHS)] = field(default_factory=dict)
    """Rate at which large frames of this peer arrived at a few peers, by digest, in kbit/s."""
    step_load: tuple[Measured, Measured, Measured] = (0, 0, 0)  # of the run being trained: a `StepLoad`
    drafts: Annotated[int, Meta(ge=0, le=MAX_ANNOUNCED_DRAFTS)] = 0  # most guesses in flight that it takes of a session
    pair_units_per_s: Figure = 0.0  # one position of a step of two, which a guess makes of a decode step
    draft_model: Annotated[str, Meta(max_length=MAX_DRAFT_MODEL_CHARS)] = ""  # name of the model that it guesses with
    tune_percent: Annotated[int, Meta(ge=0, le=100)] = 0  # of its time for tuning adapters of others; 0: it takes none
    bits: BitsClass = b""

    def rules(self) -> dict[str, bool]:
        texts = (self.peer, self.name, self.device, self.number_format, self.draft_model, *self.addresses)
        return {
            "control characters": all(text.isprintable() for text in texts),
            "number format": self.number_format.isascii(),
            "spans": all(0 <= start <= end <= MAX_UNITS for start, end in (self.span, self.seeds, self.left)),
            "times": 0 < self.expires_at - self.issued_at <= MAX_LIFE_S,
            "addresses": all(address.startswith("/") for address in self.addresses),
            "coordinate": len(self.coordinate) in (0, COORDINATE_NUMBERS)
            and all(number >= 0 for number in self.coordinate[-2:]),  # height and error
        }

    def __repr__(self) -> str:
        start, end = self.span
        return f"<Announcement {self.name or self.peer[-8:]} {self.life.name} [{start}:{end}) #{self.sequence}>"

    @property
    def life(self) -> State:
        """State as this version understands it; OFFLINE if it is unknown."""
        return State(self.state) if self.state in State._value2member_map_ else State.OFFLINE

    @property
    def reach(self) -> Reachability:
        """Reachability as this version understands it; UNKNOWN if it is new."""
        known = self.reachability in Reachability._value2member_map_
        return Reachability(self.reachability) if known else Reachability.UNKNOWN

    def holds(self, unit: int) -> bool:
        """Return whether the peer holds the layer with this number."""
        return self.span[0] <= unit < self.span[1]


Vouch = Callable[[Announcement, bytes], None]
"""Function of (announcement, certificate) that raises ProtocolError if its author may not announce this."""


class _Certified(Signed, frozen=True):
    certificate: bytes = b""


_record_decoder = msgspec.msgpack.Decoder(_Certified)


def peer_digest(peer: PeerId) -> bytes:
    """Return 8 bytes that stand for a peer id where space is short, and that spread peers evenly over shards."""
    return hashlib.sha256(peer.encode()).digest()[:DIGEST_BYTES]


def sign_announcement(announcement: Announcement, sign: Sign, certificate: bytes = b"") -> bytes:
    """Sign an announcement, and return the record to store; in a private swarm it includes the author's certificate.

    Raises ValueError if the announcement breaks one of its rules or is too large, which is a bug of the caller.
    """
    _KIND.check(announcement)
    signed = _KIND.enveloped(announcement, sign)
    record = msgspec.msgpack.encode(signed)
    if len(record) > MAX_RECORD_BYTES:
        raise ValueError(f"announcement of {len(record)} bytes; the bound is {MAX_RECORD_BYTES}")
    return msgspec.msgpack.encode(_Certified(signed.body, signed.signature, certificate)) if certificate else record


def fit(announcement: Announcement) -> Announcement:
    """Return the announcement without entries that do not fit into a record; the least useful go first.

    First go round trips, which the coordinate mostly replaces; then rates and codecs of links; then speeds of other
    peers; then the last addresses. The rest always fits, with every field at its limit.
    """
    for name in ("rtt_us", "path_kbps", "sends", "unit_us", "addresses"):
        entries = getattr(announcement, name)
        while entries and len(msgspec.msgpack.encode(announcement)) > MAX_BODY_BYTES:
            rest = list(entries.items() if isinstance(entries, dict) else entries)[:-1]
            entries = type(entries)(rest)
            announcement = msgspec.structs.replace(announcement, **{name: entries})
    return announcement


def open_announcement(record: bytes, swarm_id: bytes, verify: Verify) -> Announcement:
    """Open a record of this swarm. Raises ProtocolError if it is invalid or its peer did not sign it."""
    return _open_record(record, swarm_id, verify, MAX_RECORD_BYTES)[0]


@lru_cache(maxsize=REMEMBERED_RECORDS)
def _open_record(record: bytes, swarm_id: bytes, verify: Verify, max_bytes: int) -> tuple[Announcement, bytes]:
    signed = _KIND.read(record, _record_decoder, max_bytes)
    if len(record) - len(signed.certificate) > MAX_RECORD_BYTES:
        raise _KIND.too_large(record)
    return _KIND.verified(signed, swarm_id, verify), signed.certificate


def announcement_reader(swarm_id: bytes, verify: Verify, vouch: Vouch | None = None) -> Callable[[bytes], Announcement]:
    """Return a function that opens records of one swarm, as `open_announcement` does.

    It calls `vouch` every time, because memberships end.
    """
    max_bytes = MAX_RECORD_BYTES + (MAX_CERTIFICATE_BYTES if vouch is not None else 0)

    def read(record: bytes) -> Announcement:
        announcement, certificate = _open_record(record, swarm_id, verify, max_bytes)
        if vouch is not None:
            vouch(announcement, certificate)
        return announcement

    return read


_KIND = PeerSigned("announcement", Announcement, domain=DOMAIN, max_bytes=MAX_RECORD_BYTES, author="peer")


class StepLoad(NamedTuple):
    """Work of one training step: its microbatches, positions of a microbatch, and averaged gradient bytes per 1,000
    parameters.

    All are 0 if there is no run.
    """

    microbatches: int = 0
    positions: int = 0
    averaged_millibytes: int = 0

    @property
    def all_positions(self) -> int:
        """Positions in one step; 0 if there is no run."""
        return self.microbatches * self.positions


def middle_load(loads: Iterable[StepLoad]) -> StepLoad:
    """Return, figure by figure, the median of the known loads, so that no single peer decides it. All figures are 0 if
    none is known."""
    known = [load for load in loads if load.all_positions]
    return StepLoad(*map(statistics.median_low, zip(*known, strict=True))) if known else StepLoad()


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Part of an announcement, filled by one part of the node. Fields are those of `Announcement`, with their units and
    bounds."""


class Introduction(Section, frozen=True, kw_only=True):
    """Section of an announcement with the name and the addresses of the peer. Filled by the host."""

    name: str | UnsetType = UNSET
    addresses: tuple[str, ...] | UnsetType = UNSET


class Place(Section, frozen=True, kw_only=True):
    """Section of an announcement with the state and the layers of the peer. Filled by the node and its placement."""

    state: int | UnsetType = UNSET
    span: tuple[int, int] | UnsetType = UNSET
    seeds: tuple[int, int] | UnsetType = UNSET


class Machine(Section, frozen=True, kw_only=True):
    """Section of an announcement with the peer's device, number format and memory. Filled by the hardware
    probe; a bootstrap peer that computes nothing gives only the device, `none`."""

    device: str | UnsetType = UNSET
    number_format: str | UnsetType = UNSET
    memory_bytes: int | UnsetType = UNSET


class WorkSpeeds(Section, frozen=True, kw_only=True):
    """Computing speeds that a peer announces, as its `Capability` fills them in; a speed that was not measured is UNSET."""

    decode_units_per_s: float | UnsetType = UNSET
    prefill_units_per_s: float | UnsetType = UNSET
    training_units_per_s: float | UnsetType = UNSET
    parallel_speedup: float | UnsetType = UNSET
    pair_units_per_s: float | UnsetType = UNSET


class ServingLoad(Section, frozen=True, kw_only=True):
    """Section of an announcement: the number of sessions, the cache positions that are free, the guesses that a session may have
    in flight, the name of the draft model, and the class of equal bits. Filled by the serving stage."""

    sessions: int | UnsetType = UNSET
    cache_tokens_free: int | UnsetType = UNSET
    drafts: int | UnsetType = UNSET
    draft_model: str | UnsetType = UNSET
    bits: bytes | UnsetType = UNSET


class TuningOffer(Section, frozen=True, kw_only=True):
    """Section of an announcement with the share of its time that the peer lends to tuning adapters, in percent. Filled by the
    tuning stage."""

    tune_percent: int | UnsetType = UNSET


class TrainingNews(Section, frozen=True, kw_only=True):
    """Section of an announcement with the step, load and codecs of the training. Filled by the training worker."""

    training_step: int | UnsetType = UNSET
    step_load: tuple[int, int, int] | UnsetType = UNSET
    sends: dict[bytes, int] | UnsetType = UNSET


class DiskOffer(Section, frozen=True, kw_only=True):
    """Section of an announcement with the disk space for training states of other peers. Filled by the backup server."""

    backup_bytes: int | UnsetType = UNSET


class PathNews(Section, frozen=True, kw_only=True):
    """Section of an announcement with measured links: bandwidths, round trips, coordinate and reachability. Filled by the paths."""

    up_bps: float | UnsetType = UNSET
    down_bps: float | UnsetType = UNSET
    rtt_us: dict[bytes, int] | UnsetType = UNSET
    path_kbps: dict[bytes, int] | UnsetType = UNSET
    coordinate: tuple[int, ...] | UnsetType = UNSET
    reachability: int | UnsetType = UNSET


class ObservedSpeeds(Section, frozen=True, kw_only=True):
    """Section of an announcement with the speeds of other peers, as this peer measured them in use. Filled by the observed
    latency."""

    unit_us: dict[bytes, int] | UnsetType = UNSET


def said(sections: Iterable[Section]) -> dict[str, Any]:
    """Return the set fields of all sections; of a field that is set twice, the later value counts."""
    told = ((name, getattr(section, name)) for section in sections for name in section.__struct_fields__)
    return {name: value for name, value in told if value is not UNSET}


MIN_END_CHARS = 8
GROUP = "group:"
NETWORK = "net:"
IpNetwork = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]


@dataclass(frozen=True)
class Trust:
    """Condition on peers: a peer is trusted if any one of these matches. An empty condition trusts every peer."""

    peers: tuple[str, ...] = ()  # peer ids, or their ends
    groups: tuple[str, ...] = ()
    networks: tuple[IpNetwork, ...] = ()

    def __repr__(self) -> str:
        words = [*self.peers, *(GROUP + group for group in self.groups), *(f"{NETWORK}{net}" for net in self.networks)]
        return f"<Trust in {', '.join(words) or 'everybody'}>"

    def covers(self, announcement: Announcement, group: str = "") -> bool:
        """Return whether the peer of this announcement may compute. `group` is the group in its certificate."""
        hosts = [ip_of(address) for address in announcement.addresses]
        return (
            self == EVERYBODY
            or any(announcement.peer.endswith(peer) for peer in self.peers)
            or (bool(group) and group in self.groups)
            or any(hosts and all(host is not None and host in network for host in hosts) for network in self.networks)
        )


EVERYBODY = Trust()


def parse_trust(words: Iterable[str]) -> Trust:
    """Parse the values of `--trust`. Raises UsageError if one is not a peer, group or network."""
    peers, groups, networks = [], [], []
    for word in words:
        if word.startswith(GROUP):
            groups.append(word.removeprefix(GROUP))
        elif word.startswith(NETWORK):
            try:
                networks.append(ipaddress.ip_network(text := word.removeprefix(NETWORK)))
            except ValueError as error:
                raise UsageError(f"{text!r} is not a network like 203.0.113.0/24: {error}") from None
        elif len(word) >= MIN_END_CHARS and word.isalnum():
            peers.append(word)
        else:
            raise UsageError(
                f"{word!r} is not a peer, group or network; give a peer's id or at least its last {MIN_END_CHARS} characters, "
                "group:NAME or net:203.0.113.0/24"
            )
    return Trust(tuple(peers), tuple(groups), tuple(networks))
