"""Trust in peers that the user names, and the standing of all peers in this peer's audits.

A standing is kept over restarts and forgotten in days.

Who passed many audits is trusted more: asked first, and audited less. Who was found to compute falsely is shunned. Where two
contradict one another and nobody can tell who is right, both are in doubt; doubts with several others add up to a finding.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Union

import msgspec

from swarmnode.errors import UsageError
from swarmnode.net.addressing.addresses import ip_of
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.storage.small_files import read_kept, try_to_keep

log = logging.getLogger(__name__)

HALF_LIFE_S = 3 * 86_400.0  # of what was passed
SHUN_S = 7 * 86_400.0
DOUBT_S = 3 * 86_400.0
DOUBTS = 3  # with as many different others
NEAR_MISSES = 3  # texts, at least
NEAR_MISS_RATE = 5e-4  # texts of honest peers that come near, a position: over Gemma 3 in bfloat16
CHANCE = 1e-7  # of so many by accident
HALF_TRUST = 2_000.0  # audited positions
NEWCOMER_WEIGHT = 0.25
MAX_PEERS = 1_024
MAX_FILE_BYTES = 1 << 20
MIN_END_CHARS = 8
GROUP = "group:"
NETWORK = "net:"
IpNetwork = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]


@dataclass(frozen=True)
class Trust:
    """Peers that are trusted for any one of these reasons. An empty one trusts everybody."""

    peers: tuple[str, ...] = ()  # ids, or their ends
    groups: tuple[str, ...] = ()
    networks: tuple[IpNetwork, ...] = ()

    def __repr__(self) -> str:
        words = [*self.peers, *(GROUP + group for group in self.groups), *(f"{NETWORK}{net}" for net in self.networks)]
        return f"<Trust in {', '.join(words) or 'everybody'}>"

    def covers(self, announcement: Announcement, group: str = "") -> bool:
        """Whether the peer that announces this may compute; `group` is what its certificate says."""
        return (
            self == EVERYBODY
            or any(announcement.peer.endswith(peer) for peer in self.peers)
            or (bool(group) and group in self.groups)
            or any(_lies_in(announcement, network) for network in self.networks)
        )


EVERYBODY = Trust()


def parse_trust(words: Iterable[str]) -> Trust:
    """What `--trust` was given. Raises UsageError."""
    peers, groups, networks = [], [], []
    for word in words:
        if word.startswith(GROUP):
            groups.append(word.removeprefix(GROUP))
        elif word.startswith(NETWORK):
            networks.append(_network(word.removeprefix(NETWORK)))
        elif len(word) >= MIN_END_CHARS and word.isalnum():
            peers.append(word)
        else:
            raise UsageError(
                f"{word!r} names nobody to trust; give a peer's id or at least its last {MIN_END_CHARS} characters, "
                "group:NAME or net:203.0.113.0/24"
            )
    return Trust(tuple(peers), tuple(groups), tuple(networks))


def _network(text: str) -> IpNetwork:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a network like 203.0.113.0/24: {error}") from None


def _lies_in(announcement: Announcement, network: IpNetwork) -> bool:
    hosts = [ip_of(address) for address in announcement.addresses]
    return bool(hosts) and all(host is not None and host in network for host in hosts)


class PeerStanding(msgspec.Struct):
    """`passed` audited positions, as of unix time `at`; `doubts`: with whom, and when. `near_misses`: texts that lay a little too
    far off, of `audited` positions since it was first known, both as of `at`."""

    passed: float = 0.0
    at: float = 0.0
    shunned_until: float = 0.0
    doubts: dict[str, float] = {}
    near_misses: float = 0.0
    audited: float = 0.0


class Standing:
    """Of all peers that were audited. A missing or damaged file is an empty one. `now` is unix time in seconds."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._path = path
        self._now = now
        self._peers = read_kept(path, dict[PeerId, PeerStanding], max_bytes=MAX_FILE_BYTES) or {}
        self._changed = False

    def __repr__(self) -> str:
        return f"<Standing of {len(self._peers)} peers, {len(self.shunned)} shunned>"

    @property
    def shunned(self) -> frozenset[PeerId]:
        """Who takes no part in what this peer does."""
        now = self._now()
        return frozenset(peer for peer, known in self._peers.items() if known.shunned_until > now)

    @property
    def doubted(self) -> frozenset[PeerId]:
        """Who contradicted somebody, and is not shunned for it."""
        return frozenset(peer for peer, known in self._peers.items() if known.doubts)

    def trust(self, peer: PeerId) -> float:
        """From 0, of a newcomer, towards 1."""
        passed = self._passed(peer)
        return passed / (passed + HALF_TRUST)

    def weights(self, peers: Iterable[PeerId]) -> dict[PeerId, float]:
        """How much each peer's speed counts, beside the most trusted of them, which has 1."""
        weights = {peer: NEWCOMER_WEIGHT + (1 - NEWCOMER_WEIGHT) * self.trust(peer) for peer in peers}
        most = max(weights.values(), default=1.0)
        return {peer: weight / most for peer, weight in weights.items()}

    def pass_audit(self, peer: PeerId, positions: int) -> None:
        """So many of its positions were found right."""
        known = self._aged(peer)
        known.passed += positions
        known.audited += positions

    def come_near(self, peer: PeerId) -> None:
        """A text of it or of another one lay a little too far off, and nobody can tell whose: it has half of its trust left."""
        self._aged(peer).passed /= 2

    def near_miss(self, peer: PeerId, positions: int) -> bool:
        """A text of it, of so many positions, lay a little too far off. Whether that was one too many: then it is to be shunned."""
        known = self._aged(peer)
        known.passed /= 2
        known.near_misses += 1
        known.audited += positions
        return are_too_many(known.near_misses, known.audited)

    def forfeit(self, peer: PeerId) -> None:
        """It did not say what it did, which may be no fault of its own: what it has passed counts no more."""
        if peer in self._peers:
            self._known(peer).passed = 0.0

    def doubt(self, peer: PeerId, other: str) -> bool:
        """It contradicts `other`, and one of the two is wrong. Whether it is shunned for it, with the doubts that there were."""
        known, now = self._known(peer), self._now()
        known.doubts = {**{who: at for who, at in known.doubts.items() if at > now - DOUBT_S}, other: now}
        if len(known.doubts) < DOUBTS:
            return False
        self.shun(peer)
        return True

    def accused_in_vain(self, author: PeerId, accused: PeerId) -> None:
        """Whom it said to compute falsely was found right, again and again: it is in doubt, and shunned where it goes on."""
        if self.doubt(author, f"accusation of {accused}"):
            log.warning("peer %s accuses one honest peer after another: it is left out from now on", author)

    def shun(self, peer: PeerId) -> None:
        """It was found to compute falsely: it begins anew, in a week."""
        known = self._known(peer)
        known.passed, known.shunned_until, known.doubts = 0.0, self._now() + SHUN_S, {}
        known.near_misses = known.audited = 0.0

    def save(self) -> None:
        """Write the file if something changed. If it cannot be written, that is logged."""
        if self._changed:
            self._changed = False
            try_to_keep(self._path, self._peers, "what audits have found is")

    async def keep(self) -> None:
        """Write the file as `save` does, beside the event loop."""
        await asyncio.to_thread(self.save)

    def _passed(self, peer: PeerId) -> float:
        known = self._peers.get(peer)
        return 0.0 if known is None else known.passed * 0.5 ** max(0.0, (self._now() - known.at) / HALF_LIFE_S)

    def _aged(self, peer: PeerId) -> PeerStanding:
        """Its entry as of now, which is about to change: what was found is half forgotten after HALF_LIFE_S."""
        known, now = self._known(peer), self._now()
        left = 0.5 ** max(0.0, (now - known.at) / HALF_LIFE_S)
        known.passed, known.near_misses, known.audited = (
            left * count for count in (known.passed, known.near_misses, known.audited)
        )
        known.at = now
        return known

    def _known(self, peer: PeerId) -> PeerStanding:
        """Its entry, which is about to change; who matters least gives way."""
        self._changed = True
        if peer not in self._peers and len(self._peers) >= MAX_PEERS:
            now = self._now()
            least = min(self._peers, key=lambda one: (self._peers[one].shunned_until > now, self._passed(one)))
            del self._peers[least]
        return self._peers.setdefault(peer, PeerStanding())


def are_too_many(near_misses: float, positions: float) -> bool:
    """Whether so many texts with a near miss, of so many positions together, are more than an honest peer would have once in ten
    million times."""
    if near_misses < NEAR_MISSES:
        return False
    expected = NEAR_MISS_RATE * positions
    below = math.fsum(expected**count / math.factorial(count) for count in range(math.floor(near_misses)))
    return 1 - math.exp(-expected) * below < CHANCE
