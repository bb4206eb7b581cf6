"""The announcement: what a peer says of itself, signed with its own key (`protocol/records.md`).

In the DHT a record is the msgpack array [body, signature], in a private swarm [body, signature, certificate]; the signature
is over `DOMAIN || body` by the key of the peer that the body names. The body carries the swarm's id, so a record cannot be
moved to another swarm; its own times, so it cannot live longer than its author wanted; and a sequence number, so an older
one cannot replace it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache

import msgspec

from swarmnode.net.addressing.reachability import Reachability
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.signed import PeerSigned, Signed, first_broken
from swarmnode.swarm.records.signed import Sign as Sign
from swarmnode.swarm.records.signed import Verify as Verify

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
MAX_PARALLEL_SPEEDUP = 16.0  # the cards of the largest boxes; more is not believed
MAX_CODECS = 16
MAX_CODEC = 255
COORDINATE_NUMBERS = 5
MAX_COORDINATE = 1 << 20  # 105 s in steps of 0.1 ms: far beyond any round trip
REMEMBERED_RECORDS = 1024
MAX_LIFE_S = 600.0
MAX_SKEW_S = 10.0


class State(IntEnum):
    """Where a peer is in its life. A reader treats a state that it does not know as OFFLINE."""

    JOINING = 0  # claims its span, may still choose another
    LOADING = 1  # will hold its span soon
    READY = 2
    DRAINING = 3  # finishes its sessions, takes nothing new
    OFFLINE = 4  # goodbye
    PAUSED = 5  # holds nothing at the moment, and will come back


class Announcement(msgspec.Struct, array_like=True, frozen=True):
    """What a peer says of itself. Newer versions append fields; missing trailing fields take their defaults.

    `addresses` are multiaddrs without the /p2p/ part, which is `peer`. `rtt_us` maps `peer_digest` of a few other peers
    to the round trip measured to them, in microseconds. `coordinate` is that of `net/measuring/coordinate.py`: x, y, z
    and height in
    steps of 0.1 ms, then the error in percent; empty where there is none yet.
    """

    version: int
    swarm: bytes
    peer: PeerId
    sequence: int  # grows with every record of this peer, over restarts too
    issued_at: float  # unix time, seconds
    expires_at: float
    started_at: float  # when this run of the peer began
    state: int = State.JOINING
    span: tuple[int, int] = (0, 0)  # units [i, j) that the peer computes
    seeds: tuple[int, int] = (0, 0)  # units [i, j) whose weights it can give to others
    name: str = ""
    device: str = ""
    decode_units_per_s: float = 0.0  # one position of one session through one unit
    prefill_units_per_s: float = 0.0  # the same inside long prompt chunks
    cache_tokens_free: int = 0
    memory_bytes: int = 0
    up_bps: float = 0.0
    down_bps: float = 0.0
    sessions: int = 0
    codecs: tuple[int, ...] = (0,)
    addresses: tuple[str, ...] = ()
    rtt_us: dict[bytes, int] = {}
    training_step: int = 0  # of a swarm in training: the step that the peer is at
    sends: dict[
        bytes, int
    ] = {}  # codecs of what it sends to other stages, by the digest of the peer, where it is not NONE
    training_units_per_s: float = 0.0  # one position through one unit, forward and backward
    coordinate: tuple[int, ...] = ()
    reachability: int = Reachability.UNKNOWN
    unit_us: dict[bytes, int] = {}  # of a few peers, by digest: how long a unit took them while this peer used them
    number_format: str = ""  # in which it computes: bfloat16, bfloat16-nf4
    left: tuple[int, int] = (0, 0)  # units that it held until now, and under whose keys it says so once more
    backup_bytes: int = 0  # disk space that it offers for training states of others
    parallel_speedup: float = 1.0  # as many times the decode speed of one session do several have together
    path_kbps: dict[bytes, int] = {}  # how fast its large frames came in at a few peers, by digest, kbit/s
    step_load: tuple[int, int, int] = (0, 0, 0)  # of the run that it trains: a `StepLoad`

    def __repr__(self) -> str:
        start, end = self.span
        return f"<Announcement {self.name or self.peer[-8:]} {self.life.name} [{start}:{end}) #{self.sequence}>"

    @property
    def life(self) -> State:
        """The state as this version understands it."""
        return State(self.state) if self.state in State._value2member_map_ else State.OFFLINE

    @property
    def reach(self) -> Reachability:
        """The reachability as this version understands it."""
        known = self.reachability in Reachability._value2member_map_
        return Reachability(self.reachability) if known else Reachability.UNKNOWN

    def holds(self, unit: int) -> bool:
        """Whether the peer's span contains the unit."""
        return self.span[0] <= unit < self.span[1]


Vouch = Callable[[Announcement, bytes], None]
"""(announcement, certificate): raises ProtocolError where its author may not say so"""


class _Certified(Signed, frozen=True):
    certificate: bytes = b""


_record_decoder = msgspec.msgpack.Decoder(_Certified)


def peer_digest(peer: PeerId) -> bytes:
    """8 bytes that stand for a peer id where space is short, and that spread peers evenly over shards."""
    return hashlib.sha256(peer.encode()).digest()[:DIGEST_BYTES]


def sign_announcement(announcement: Announcement, sign: Sign, certificate: bytes = b"") -> bytes:
    """The record to store, of a private swarm with its author's certificate.

    Raises ValueError where the announcement breaks a rule of its own, which is a bug of the caller.
    """
    broken = first_broken(_rules(announcement))
    if broken is not None:
        raise ValueError(f"announcement not valid: {broken}")
    signed = _KIND.sign(announcement, sign)
    record = msgspec.msgpack.encode(signed)
    if len(record) > MAX_RECORD_BYTES:
        raise ValueError(f"announcement of {len(record)} bytes; the bound is {MAX_RECORD_BYTES}")
    return msgspec.msgpack.encode(_Certified(signed.body, signed.signature, certificate)) if certificate else record


def fit(announcement: Announcement) -> Announcement:
    """The announcement without the entries for which a record has no room: the least useful go first.

    Round trips, of which the coordinate tells the most; then how fast links are, and what they travel as; how fast others were;
    then the last addresses. What is left then always fits, every field at its limit.
    """
    for field in ("rtt_us", "path_kbps", "sends", "unit_us", "addresses"):
        entries = getattr(announcement, field)
        while entries and len(msgspec.msgpack.encode(announcement)) > MAX_BODY_BYTES:
            rest = list(entries.items() if isinstance(entries, dict) else entries)[:-1]
            entries = type(entries)(rest)
            announcement = msgspec.structs.replace(announcement, **{field: entries})
    return announcement


def open_announcement(record: bytes, swarm_id: bytes, verify: Verify) -> Announcement:
    """The announcement in a record of this swarm. Raises ProtocolError where it is not its peer's."""
    return _open_record(record, swarm_id, verify, MAX_RECORD_BYTES)[0]


@lru_cache(maxsize=REMEMBERED_RECORDS)
def _open_record(record: bytes, swarm_id: bytes, verify: Verify, max_bytes: int) -> tuple[Announcement, bytes]:
    signed = _KIND.decode(record, _record_decoder, max_bytes)
    if len(record) - len(signed.certificate) > MAX_RECORD_BYTES:
        raise _KIND.too_large(record)
    return _KIND.open(signed, swarm_id, verify), signed.certificate


def announcement_reader(swarm_id: bytes, verify: Verify, vouch: Vouch | None = None) -> Callable[[bytes], Announcement]:
    """`open_announcement` for one swarm. `vouch` is asked every time: memberships end."""
    max_bytes = MAX_RECORD_BYTES + (MAX_CERTIFICATE_BYTES if vouch is not None else 0)

    def read(record: bytes) -> Announcement:
        announcement, certificate = _open_record(record, swarm_id, verify, max_bytes)
        if vouch is not None:
            vouch(announcement, certificate)
        return announcement

    return read


def _rules(announcement: Announcement) -> dict[str, bool]:
    """What each field must keep to, and whether it does."""
    numbers = (
        announcement.decode_units_per_s,
        announcement.prefill_units_per_s,
        announcement.training_units_per_s,
        announcement.up_bps,
        announcement.down_bps,
        announcement.started_at,
    )
    counts = (
        announcement.sequence,
        announcement.cache_tokens_free,
        announcement.memory_bytes,
        announcement.sessions,
        announcement.training_step,
        announcement.reachability,
        announcement.backup_bytes,
    )
    texts = (
        announcement.peer,
        announcement.name,
        announcement.device,
        announcement.number_format,
        *announcement.addresses,
    )
    return {
        "version": announcement.version >= VERSION,
        "peer": 0 < len(announcement.peer) <= MAX_PEER_CHARS,
        "name": len(announcement.name) <= MAX_NAME_CHARS,
        "device": len(announcement.device) <= MAX_DEVICE_CHARS,
        "number format": len(announcement.number_format) <= MAX_FORMAT_CHARS and announcement.number_format.isascii(),
        "control characters": all(text.isprintable() for text in texts),
        "span": all(map(_is_span, (announcement.span, announcement.seeds, announcement.left))),
        "numbers": all(0 <= number < 1e18 for number in numbers) and all(0 <= count < 1 << 63 for count in counts),
        "parallel speedup": 1 <= announcement.parallel_speedup <= MAX_PARALLEL_SPEEDUP,
        "times": 0 < announcement.expires_at - announcement.issued_at <= MAX_LIFE_S,
        "addresses": len(announcement.addresses) <= MAX_ADDRESSES
        and all(address.startswith("/") and len(address) <= MAX_ADDRESS_CHARS for address in announcement.addresses),
        "codecs": len(announcement.codecs) <= MAX_CODECS,
        "sends": len(announcement.sends) <= MAX_RTTS
        and all(
            len(digest) == DIGEST_BYTES and 0 <= codec <= MAX_CODEC for digest, codec in announcement.sends.items()
        ),
        "coordinate": len(announcement.coordinate) in (0, COORDINATE_NUMBERS)
        and all(abs(number) <= MAX_COORDINATE for number in announcement.coordinate)
        and all(number >= 0 for number in announcement.coordinate[-2:]),  # height and error
        "rtts": _are_measured(announcement.rtt_us, MAX_RTTS),
        "unit times": _are_measured(announcement.unit_us, MAX_UNIT_TIMES),
        "paths": _are_measured(announcement.path_kbps, MAX_PATHS),
        "step load": all(0 <= number < 1 << 32 for number in announcement.step_load),
    }


def _are_measured(values: dict[bytes, int], most: int) -> bool:
    """Of a few other peers, by digest."""
    return len(values) <= most and all(
        len(digest) == DIGEST_BYTES and 0 <= value < 1 << 32 for digest, value in values.items()
    )


def _is_span(span: tuple[int, int]) -> bool:
    return 0 <= span[0] <= span[1] <= MAX_UNITS


_KIND = PeerSigned(
    "announcement", Announcement, domain=DOMAIN, rules=_rules, author=lambda announcement: announcement.peer
)
