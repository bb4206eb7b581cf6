"""Settings of a link: its patience, its frame size, and the objects that it shares with the node's other links."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarmnode.codec.body import VERSION
from swarmnode.codec.frames import MAX_PAYLOAD_BYTES
from swarmnode.codec.messages import Hello
from swarmnode.ledger import MemoryLedger
from swarmnode.links.link_statistics import LinkStatistics, Traffic
from swarmnode.links.pacing import HeartbeatConfig, RateLimiter
from swarmnode.net.addressing.addresses import Claimant, owner_of
from swarmnode.net.clock import Deadline
from swarmnode.net.fair_share import FairPace, Pace, Recent
from swarmnode.net.interfaces import PeerId
from swarmnode.net.network_config import OPEN_GATE, Gate
from swarmnode.net.tasks import Supervisor

FRAMES = Pace(10_000, 20_000), Pace(20_000, 40_000)  # frames of a peer, of an address group
CONNECTING = Deadline(floor_s=2.0, ceiling_s=5.0, slack=8.0)
PEERS_KEPT = 256
FEWEST = 2  # peers needed for a conclusion: a single one never decides


class PeerVersions:
    """Protocol versions that peers speak, from the latest greetings on all links of the node."""

    def __init__(self) -> None:
        self._newest: Recent[str, int] = Recent(PEERS_KEPT)

    def __repr__(self) -> str:
        return f"<PeerVersions of {len(self._newest)} peers>"

    def __len__(self) -> int:
        return len(self._newest)

    def greeted(self, by: Claimant, hello: Hello) -> None:
        """Record the newest version in a greeting. The peers of an address group on the open internet count as one; its latest
        greeting decides."""
        self._newest[owner_of(by)] = hello.spoken[1]

    @property
    def newer(self) -> int | None:
        """The newest version that more than half of the peers speak, if it is newer than this node's; else None. None with fewer
        than two peers."""
        ranked = sorted(self._newest.values(), reverse=True)
        if len(ranked) < FEWEST:
            return None
        most = ranked[len(ranked) // 2]
        return most if most > VERSION else None


@dataclass(frozen=True)
class LinkConfig:
    """Settings of a link: its patience, its frame size, and the objects that it shares with the node's other links."""

    connecting: Deadline = CONNECTING  # to reach a peer, and again for its greeting
    addresses_of: Callable[[PeerId], Sequence[str]] = lambda _peer: ()  # those that a peer announced
    heartbeat: HeartbeatConfig = field(default_factory=HeartbeatConfig)
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    rate_limiter: RateLimiter | None = None  # of uploads of all the node's links together; None: no limit
    download_limiter: RateLimiter | None = None  # of downloads of all the node's links together; None: no limit
    link_statistics: LinkStatistics = field(default_factory=LinkStatistics)  # measurements of all the node's links
    peer_versions: PeerVersions = field(default_factory=PeerVersions)  # of the peers that greeted on any of them
    traffic: Traffic = field(default_factory=Traffic)  # of all the node's links together
    gate: Gate = OPEN_GATE  # of all the node's links together
    pace: FairPace = field(default_factory=lambda: FairPace(*FRAMES))  # of received frames, over all the node's links
    ledger: MemoryLedger = field(default_factory=MemoryLedger)  # of the host: received payloads, journals
    supervisor: Supervisor = field(default_factory=Supervisor)  # of the peer: learns of tasks that die of a bug
    clock: Callable[[], float] = time.perf_counter  # for round trips: uvloop's own has milliseconds only
