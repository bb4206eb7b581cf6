"""Peer table: announcements and suspicions in, live peers out. It reads no clock.

A peer is live while its newest announcement has not expired and is no goodbye. A suspected peer is dropped at once. It
comes back by its own announcement: at once after a restart, otherwise by one issued after the suspicion, and after a
probation that doubles with every further suspicion. A peer that announces a pause is forgiven: letting go of its layers
is no fault.

For each peer that is ready with layers, the table remembers the training step that the earlier holders had reached when the
peer became ready. Only this machine's own view counts, so no peer can claim an earlier step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import Announcement, State
from swarmnode.tolerances import FORGIVEN_AFTER_S, MAX_PROBATION_S, PROBATION_S

MAX_PEERS = 16_384
FIRST_LOOK_S = 20.0  # peers that are seen so soon after the first one were there before
AWAY_S = 600.0  # how long a peer whose announcement ended keeps its place among the holders


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Reason and time of dropping a peer; `sequence` and `started_at` are those of its announcement at that time."""

    reason: str
    at: float
    sequence: int
    started_at: float
    count: int

    @property
    def until(self) -> float:
        """End of the probation."""
        return self.at + min(MAX_PROBATION_S, PROBATION_S * 2.0 ** min(self.count - 1, 10))

    def lifted_by(self, announcement: Announcement, now: float) -> bool:
        """Return whether `announcement` ends the suspicion: the peer has restarted, or it announces itself again and the
        probation is over."""
        if announcement.started_at > self.started_at:
            return True
        issued_after = announcement.sequence > self.sequence and announcement.issued_at > self.at
        return issued_after and now >= self.until


@dataclass(frozen=True, slots=True)
class ReadyPeer:
    """Layers (`span`) that a peer is ready with, the training step of their earlier holders when it came (`after`), and the time
    when it was last seen. `after` is -1 if the layers had no holder, or if the peer came before this machine watched the swarm."""

    span: tuple[int, int]
    after: int
    seen_at: float


class PeerTable:
    """Newest announcement of every peer, and the suspicions. Times are unix seconds, given by the caller."""

    def __init__(self) -> None:
        self._newest: dict[PeerId, Announcement] = {}
        self._suspicions: dict[PeerId, Suspicion] = {}
        self._live: dict[PeerId, Announcement] = {}
        self._holdings: dict[PeerId, ReadyPeer] = {}
        self._first_look_until: float | None = None

    def __repr__(self) -> str:
        return f"<PeerTable {len(self._live)} live, {len(self._newest)} known, {len(self._suspicions)} suspected>"

    @property
    def live(self) -> Mapping[PeerId, Announcement]:
        """Live peers as of the last `update`; a snapshot that later updates do not change."""
        return MappingProxyType(self._live)

    def ready_after(self) -> Mapping[PeerId, int]:
        """Return `ReadyPeer.after` by peer, including peers that were ready until their announcement ended at most `AWAY_S` ago."""
        return {peer: holding.after for peer, holding in self._holdings.items()}

    def suspects(self, now: float) -> Mapping[PeerId, Announcement]:
        """Return the announcements of peers that would be live without a suspicion."""
        return {
            peer: known
            for peer in self._suspicions
            if (known := self._newest.get(peer)) is not None
            and peer not in self._live
            and known.expires_at > now
            and known.life is not State.OFFLINE
        }

    def why_suspected(self, peer: PeerId) -> str:
        """Return the reason for dropping a peer; empty if it is not suspected."""
        suspicion = self._suspicions.get(peer)
        return "" if suspicion is None else suspicion.reason

    def newest(self, peer: PeerId) -> Announcement | None:
        """Return the newest announcement of a peer, live or not; None if it has none."""
        return self._newest.get(peer)

    def observe(self, announcement: Announcement) -> bool:
        """Take in an announcement, and return whether it was taken. One that is not newer than the known one (a replay) is
        ignored."""
        known = self._newest.get(announcement.peer)
        if len(self._newest) >= MAX_PEERS if known is None else announcement.sequence <= known.sequence:
            return False
        self._newest[announcement.peer] = announcement
        if announcement.life is State.PAUSED:
            self._suspicions.pop(announcement.peer, None)
        return True

    def forget(self, peer: PeerId) -> None:
        """Drop the announcement of `peer` from the table."""
        self._newest.pop(peer, None)

    def suspect(self, peer: PeerId, reason: str, now: float) -> None:
        """Drop a failed peer. Nothing happens if the peer is unknown or paused."""
        known = self._newest.get(peer)
        if known is None or known.life is State.PAUSED:
            return
        earlier = self._suspicions.get(peer)
        strikes = 1 if earlier is None else earlier.count + (now >= earlier.until)
        self._suspicions[peer] = Suspicion(reason, now, known.sequence, known.started_at, strikes)

    def update(self, now: float) -> bool:
        """Recompute the live peers. Returns whether any of their announcements changed."""
        self._newest = {peer: known for peer, known in self._newest.items() if known.expires_at > now}
        self._suspicions = {
            peer: suspicion for peer, suspicion in self._suspicions.items() if now < suspicion.until + FORGIVEN_AFTER_S
        }
        live = {
            peer: known
            for peer, known in sorted(self._newest.items())
            if known.life is not State.OFFLINE
            and ((suspicion := self._suspicions.get(peer)) is None or suspicion.lifted_by(known, now))
        }
        # the layers of each ready peer; for newcomers, the training step of the earlier holders
        if self._newest and self._first_look_until is None:
            self._first_look_until = now + FIRST_LOOK_S
        ready = {peer: known for peer, known in self._newest.items() if known.life is State.READY and any(known.span)}
        kept = {peer: holding for peer, holding in self._holdings.items() if self._still_holds(peer, holding, now)}
        self._holdings = kept | {
            peer: ReadyPeer(
                known.span, kept[peer].after if peer in kept else self._step_of_holders(known, kept, now), now
            )
            for peer, known in ready.items()
        }
        changed = live != self._live
        self._live = live
        return changed

    def _still_holds(self, peer: PeerId, holding: ReadyPeer, now: float) -> bool:
        known = self._newest.get(peer)
        if known is None:
            return now < holding.seen_at + AWAY_S
        return known.life is State.READY and known.span == holding.span

    def _step_of_holders(self, newcomer: Announcement, holdings: Mapping[PeerId, ReadyPeer], now: float) -> int:
        if self._first_look_until is None or now < self._first_look_until:
            return -1
        start, end = newcomer.span
        holders = [peer for peer, held in holdings.items() if held.span[0] < end and start < held.span[1]]
        return max((self._newest[peer].training_step for peer in holders if peer in self._newest), default=-1)
