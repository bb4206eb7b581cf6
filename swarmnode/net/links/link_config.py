"""Settings of a link: its patience, its frame size, and the objects that it shares with the node's other links.

The gate: decides which peers this peer speaks with. `Gate` is that of an open swarm; `membership/access_control.py` has the one
for members.

Every link of every protocol passes it on both sides, and so does every call of the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swarmnode.codec.body import VERSION, Body
from swarmnode.codec.frames import MAX_PAYLOAD_BYTES
from swarmnode.codec.messages import Hello
from swarmnode.errors import ErrorCode
from swarmnode.ledger import MemoryLedger
from swarmnode.net.deadlines import Deadline
from swarmnode.net.interfaces import PeerId
from swarmnode.net.limits.address_group import Claimant, owner_of
from swarmnode.net.limits.fair_share import FairPace, Pace, Recent
from swarmnode.net.links.heartbeat import HeartbeatConfig
from swarmnode.net.links.rate_limiter import RateLimiter
from swarmnode.net.measuring.link_statistics import LinkStatistics, Traffic
from swarmnode.net.tasks import Supervisor


class GuardedLink(Protocol):
    """Interface to a link (`link.py`): the members that a gate uses."""

    peer: PeerId
    closed: bool  # true if nothing more can be sent

    def send(self, body: Body) -> None:
        """Queue a message to the peer. Raises PeerLost if the link is closed."""

    async def drain(self) -> None:
        """Wait until the send queue is short. Raises PeerLost if the link died meanwhile."""

    def cut(self, code: ErrorCode) -> None:
        """Refuse the peer with `code`, and end the link."""


class Gate:
    """Gate that admits every peer and shows no certificate."""

    guards_table = False  # whether calls of the table must be admitted, too

    def greeting(self, hello: Hello) -> Hello:
        """Return the greeting to send, with this peer's certificate if the swarm needs one."""
        return hello

    def admit(self, peer: PeerId, protocol: str, theirs: Hello, *, answers: bool) -> None:
        """Admit a peer by its greeting `theirs`. `answers`: this peer opened the link, and the other will serve it. Raises
        ProtocolError if it is refused."""

    def opened(self, link: GuardedLink) -> None:
        """Take note of a link that was admitted; does nothing here."""

    def closed(self, link: GuardedLink) -> None:
        """Note the end of a link. Also called for a link that was never admitted, and more than once."""

    def heard(self, link: GuardedLink, number: int, revocations: bytes) -> None:
        """Take the `number` of the peer's revocation list, or the list itself (`revocations`, else empty). Raises ProtocolError if
        it is not the owner's."""

    def may_feed(self, peer: PeerId) -> bool:
        """Return whether the peer may feed a training."""
        return True

    def may_lead(self, peer: PeerId, stages: Iterable[PeerId]) -> bool:
        """Return whether the peer may lead a training that has these stages."""
        return True

    # -- the table

    def admits(self, peer: PeerId) -> bool:
        """Return whether this peer answers calls of `peer` to the DHT."""
        return True

    async def introduce(self, peer: PeerId, *, anew: bool = False) -> None:
        """Make sure that the peer answers this peer's calls of the table; `anew` if it has forgotten this peer. Raises PeerError,
        NetworkDown."""


OPEN_GATE = Gate()


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
