"""Settings of a link: its patience, the size of its frames, and what it shares with the node's other links."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from swarmnode.codec.body import VERSION
from swarmnode.codec.frames import MAX_PAYLOAD_BYTES
from swarmnode.codec.messages import Hello
from swarmnode.ledger import MemoryLedger
from swarmnode.net.deadlines import Deadline
from swarmnode.net.limits.address_group import Claimant, owner_of
from swarmnode.net.limits.fair_share import FairPace, Pace, Recent
from swarmnode.net.links.gate import OPEN_GATE, Gate
from swarmnode.net.links.heartbeat import HeartbeatConfig
from swarmnode.net.links.rate_limiter import RateLimiter
from swarmnode.net.measuring.link_statistics import LinkStatistics
from swarmnode.net.measuring.traffic import Traffic
from swarmnode.net.tasks import Supervisor

FRAMES = Pace(10_000, 20_000), Pace(20_000, 40_000)  # of a peer, of an address group
CONNECTING = Deadline(floor_s=2.0, ceiling_s=5.0, slack=8.0)
PEERS_KEPT = 256
FEWEST = 2  # what one peer says never decides


class PeerVersions:
    """Versions of the protocol that peers speak, from the greetings on all the node's links; the latest greetings are kept."""

    def __init__(self) -> None:
        self._newest: Recent[str, int] = Recent(PEERS_KEPT)

    def __repr__(self) -> str:
        return f"<PeerVersions of {len(self._newest)} peers>"

    def __len__(self) -> int:
        return len(self._newest)

    def greeted(self, by: Claimant, hello: Hello) -> None:
        """A peer has said what it speaks."""
        self._newest[owner_of(by)] = hello.spoken[1]

    @property
    def newer(self) -> int | None:
        """The version, newer than ours, that more than half of the peers speak at least; None while this is up to date."""
        ranked = sorted(self._newest.values(), reverse=True)
        if len(ranked) < FEWEST:
            return None
        most = ranked[len(ranked) // 2]
        return most if most > VERSION else None


@dataclass(frozen=True)
class LinkConfig:
    """How patient a link is, how large its frames are, and what it shares with the node's other links."""

    connecting: Deadline = CONNECTING  # to reach a peer, and again to be greeted by it
    heartbeat: HeartbeatConfig = field(default_factory=HeartbeatConfig)
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    rate_limiter: RateLimiter | None = None  # of all the node's links together; None: as fast as it goes
    download_limiter: RateLimiter | None = None  # the same, of what comes in
    link_statistics: LinkStatistics = field(default_factory=LinkStatistics)  # what all the node's links measure
    peer_versions: PeerVersions = field(default_factory=PeerVersions)  # of the peers that greeted on any of them
    traffic: Traffic = field(default_factory=Traffic)  # of all the node's links together
    gate: Gate = OPEN_GATE  # of all the node's links together
    pace: FairPace = field(default_factory=lambda: FairPace(*FRAMES))  # of what others send, over all the node's links
    ledger: MemoryLedger = field(default_factory=MemoryLedger)  # of the host: payloads that came in, journals
    supervisor: Supervisor = field(default_factory=Supervisor)  # of the peer: hears where its tasks die of a bug
    clock: Callable[[], float] = time.perf_counter  # for round trips: uvloop's own has milliseconds only
