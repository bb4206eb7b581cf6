"""View: a frozen snapshot of the peers, the input of every planner."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from swarmnode.codec.messages import ANY_DRAFTS
from swarmnode.links.link_statistics import MAX_ERROR, Coordinate
from swarmnode.net.addressing.addresses import home_of, wide_group
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import Announcement, State, peer_digest

DEFAULT_RTT_S = 0.05  # between home machines of one continent, where nothing was measured
PREFILL_GAIN = 10.0  # a position within a long chunk, as against one alone, where it was not measured
MIN_MEASURED = 3  # peers, before their median speed counts as usual
UNMEASURED_UNITS_PER_S = 100.0  # a home machine with a small model, as a first guess


class Span(NamedTuple):
    """Half-open range [start, end) of the model's layers; the embedding and the head count as layers."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"[{self.start}:{self.end})"

    @property
    def units(self) -> int:
        """Number of layers in the span."""
        return self.end - self.start

    def overlaps(self, other: Span) -> bool:
        """Return whether the spans have a layer in common."""
        return max(self.start, other.start) < min(self.end, other.end)


@dataclass(frozen=True, slots=True)
class PeerView:
    """Peer as the planners see it: its layers, state, speeds and room. A speed or bandwidth of 0 is unmeasured."""

    peer: PeerId
    span: Span
    state: State = State.READY
    decode_units_per_s: float = 0.0
    sessions: int = 0
    started_at: float = 0.0
    up_bps: float = 0.0
    down_bps: float = 0.0
    prefill_units_per_s: float = 0.0
    cache_tokens_free: int | None = None  # None: it did not say
    group: str = ""  # its address group, of the open internet
    memory_bytes: int = 0  # that it lends; 0: it did not say
    parallel_speedup: float = 1.0  # as many times its decode speed do several sessions have together
    has_trained: bool = True  # its units are as they were trained, where anything is
    home: str = ""  # its address, of the open internet: peers with the same one share a line
    draft_model: str = ""  # name of the model whose texts it guesses with; empty: none

    @property
    def assumed_units_per_s(self) -> float:
        """Decode speed in layers/s; a default if it is unmeasured."""
        return self.decode_units_per_s or UNMEASURED_UNITS_PER_S

    @property
    def assumed_prefill_units_per_s(self) -> float:
        """Prefill speed in layers/s; derived from the decode speed if it is unmeasured."""
        return self.prefill_units_per_s or PREFILL_GAIN * self.assumed_units_per_s

    def has_room(self, tokens: int) -> bool:
        """Return whether the peer's caches take `tokens` more positions; True if the peer did not announce its free room."""
        return self.cache_tokens_free is None or tokens <= self.cache_tokens_free

    def has_drafts(self, proposer: str) -> bool:
        """Return whether the peer has the draft model that a client asks for by `proposer`, its name or ANY_DRAFTS."""
        return self.draft_model != "" and proposer in (ANY_DRAFTS, self.draft_model)

    def __repr__(self) -> str:
        return f"<PeerView {self.peer[-8:]} {self.span} {self.state.name} {self.decode_units_per_s:.0f} units/s>"


@dataclass(frozen=True)
class View:
    """Snapshot of all peers, with measured round trips in seconds by pairs and bandwidths in bits/s by pairs (from, to).

    Links that no peer measured are estimated from network coordinates and from the peers' lines (`plan/routes/delays.py`).
    """

    units: int  # layers of the model
    peers: tuple[PeerView, ...]
    rtt_s: Mapping[tuple[PeerId, PeerId], float] = field(default_factory=dict)
    coordinates: Mapping[PeerId, Coordinate] = field(default_factory=dict)
    position_bytes: int = 0  # what one position weighs between two stages
    path_bps: Mapping[tuple[PeerId, PeerId], float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<View of {len(self.peers)} peers, {self.units} units, {len(self.rtt_s)} links measured>"

    @property
    def default_rtt_s(self) -> float:
        """Round trip in seconds of an unmeasured link between peers without coordinates: the median of the
        measured ones, or a default if none is."""
        return statistics.median(self.rtt_s.values()) if self.rtt_s else DEFAULT_RTT_S

    @property
    def with_many_sessions(self) -> View:
        """The same view with each peer's decode speed for many sessions together instead of that for one session.

        Placement uses the speed for many sessions; the route of a session is chosen by the speed for one.
        """
        peers = (
            replace(peer, decode_units_per_s=peer.decode_units_per_s * peer.parallel_speedup, parallel_speedup=1.0)
            for peer in self.peers
        )
        return replace(self, peers=tuple(peers))


def view_of(
    units: int,
    announcements: Iterable[Announcement],
    *,
    observer: PeerId | None = None,
    rtt_s: Mapping[PeerId, float] | None = None,
    coordinate: Coordinate | None = None,
    unit_s: Mapping[PeerId, float] | None = None,
    weights: Mapping[PeerId, float] | None = None,
    position_bytes: int = 0,
    trains: bool = False,
) -> View:
    """Return the planners' snapshot of the peers that signed `announcements`, as seen by the peer `observer`.

    Args:
        units: Number of layers of the model.
        announcements: The peers' own descriptions, with the links and speeds that they measured.
        observer: Peer that plans; None for a view without its measurements.
        rtt_s: Round trips in seconds that the observer measured, by peer.
        coordinate: Network coordinate of the observer; ignored while its error is too large.
        unit_s: Seconds per layer that the observer measured, by peer. They come before all other figures of a peer's speed.
            Next comes the median of other peers' announced measurements, with one vote for each address group and none for the
            peer's own group. The peer's own figure comes last; for an observer it is at most the median of the measured speeds.
        weights: Factors on the peers' speeds, by default 1.
        position_bytes: Bytes of one position between two peers.
        trains: Whether to use the announced training speeds instead.
    """
    announced = sorted(announcements, key=lambda announcement: announcement.peer)
    by_digest = {peer_digest(announcement.peer): announcement.peer for announcement in announced}
    links = {pair: rtt_us / 1e6 for pair, rtt_us in _pairs(announced, by_digest, lambda one: one.rtt_us)}
    paths = {pair: 1e3 * kbps for pair, kbps in _pairs(announced, by_digest, lambda one: one.path_kbps) if kbps > 0}
    if observer is not None:
        links.update({(observer, peer): rtt for peer, rtt in (rtt_s or {}).items()})
    weights = weights or {}
    measured_s = {} if trains else {**_hearsay(announced, by_digest), **(unit_s or {})}
    used_s = [measured_s[one.peer] for one in announced if one.peer in measured_s]
    believed = 1 / statistics.median(used_s) if observer is not None and len(used_s) >= MIN_MEASURED else math.inf
    peers = tuple(
        PeerView(
            announcement.peer,
            Span(min(announcement.span[0], units), min(announcement.span[1], units)),
            announcement.life,
            _speed(announcement, measured_s.get(announcement.peer), believed, trains)
            * weights.get(announcement.peer, 1.0),
            announcement.sessions,
            announcement.started_at,
            announcement.up_bps,
            announcement.down_bps,
            announcement.prefill_units_per_s,
            announcement.cache_tokens_free if announcement.life is State.READY and not trains else None,
            wide_group(announcement.addresses),
            announcement.memory_bytes,
            1.0 if trains else announcement.parallel_speedup,
            not trains or announcement.training_step > 0,
            home_of(announcement.addresses),
            announcement.draft_model,
        )
        for announcement in announced
    )
    announced_places = ((one.peer, Coordinate.unpacked(one.coordinate)) for one in announced)
    places = {peer: place for peer, place in announced_places if place is not None}
    if observer is not None and coordinate is not None and coordinate.error < MAX_ERROR:
        places[observer] = coordinate
    return View(units, peers, links, places, position_bytes, paths)


def _pairs(
    announced: Sequence[Announcement],
    by_digest: Mapping[bytes, PeerId],
    values_of: Callable[[Announcement], Mapping[bytes, int]],
) -> Iterator[tuple[tuple[PeerId, PeerId], int]]:
    """Yield ((from, to), value) for each announced link between two announcing peers."""
    for announcement in announced:
        for digest, value in values_of(announcement).items():
            if digest in by_digest:
                yield (announcement.peer, by_digest[digest]), value


def _speed(announcement: Announcement, measured_s: float | None, believed: float, trains: bool) -> float:
    if trains:
        return announcement.training_units_per_s
    return 1 / measured_s if measured_s is not None else min(announcement.decode_units_per_s, believed)


def _hearsay(announced: Sequence[Announcement], by_digest: Mapping[bytes, PeerId]) -> dict[PeerId, float]:
    """Return seconds per layer by peer, as other peers announce. A peer's own address group has no vote on it."""
    groups = {announcement.peer: wide_group(announcement.addresses) or announcement.peer for announcement in announced}
    told: dict[PeerId, dict[str, list[float]]] = {}
    for announcement in announced:
        for digest, unit_us in announcement.unit_us.items():
            peer, group = by_digest.get(digest), groups[announcement.peer]
            if peer is not None and group != groups[peer] and unit_us > 0:
                told.setdefault(peer, {}).setdefault(group, []).append(unit_us / 1e6)
    return {peer: statistics.median(map(statistics.median, voices.values())) for peer, voices in told.items()}


def draw(*parts: object) -> int:
    """Return a 64-bit number that depends on `parts` alone and is spread evenly. Ties are broken by it, so that peers differ."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
