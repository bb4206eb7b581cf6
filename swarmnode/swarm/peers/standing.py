"""Trust in peers that the user names, and the standing of all peers in this peer's audits.

A standing survives restarts and fades within days. A peer that passed many audits is trusted more: it is asked first
and audited less. A peer that computed falsely is shunned. If two peers contradict each other and the client cannot tell
which is right, both are in doubt; doubts with several different peers add up to a finding.
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
from swarmnode.swarm.storage.small_files import read_stored, try_to_keep

log = logging.getLogger(__name__)

HALF_LIFE_S = 3 * 86_400.0  # half-life of passed positions, audited positions and near misses
SHUN_S = 7 * 86_400.0
DOUBT_S = 3 * 86_400.0
DOUBTS = 3  # with this many different others
NEAR_MISSES = 3  # texts at least
NEAR_MISS_RATE = (
    1e-4  # near misses of honest peers per position: none in 90 texts of two models (docs/decisions/audits.md)
)
MAX_NEAR_TEXTS = 64
REPEATED = 0.25  # near misses that a text counts for if it comes again
CHANCE = 1e-7  # probability of an honest peer's near misses below which they are too many
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


class PeerStanding(msgspec.Struct):
    """A peer's audit record: `passed` audited positions as of unix time `at`, and `doubts` (the other side, and when).

    `near_misses` counts texts that deviated a little too much, in `audited` positions; both as of `at`. `near_texts` are digests of
    the latest of these texts.
    """

    passed: float = 0.0
    at: float = 0.0
    shunned_until: float = 0.0
    doubts: dict[str, float] = {}
    near_misses: float = 0.0
    audited: float = 0.0
    near_texts: tuple[bytes, ...] = ()


class Standing:
    """Standing of all audited peers. A missing or damaged file counts as empty. `now` returns unix time in seconds."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._path = path
        self._now = now
        self._peers = read_stored(path, dict[PeerId, PeerStanding], max_bytes=MAX_FILE_BYTES) or {}
        self._changed = False

    @property
    def shunned(self) -> frozenset[PeerId]:
        """Peers that are excluded now, because they were found to compute falsely."""
        now = self._now()
        return frozenset(peer for peer, known in self._peers.items() if known.shunned_until > now)

    @property
    def doubted(self) -> frozenset[PeerId]:
        """Peers with a doubt on record. `shun` clears the doubts of a peer."""
        return frozenset(peer for peer, known in self._peers.items() if known.doubts)

    def trust(self, peer: PeerId) -> float:
        """Return the trust in a peer, from 0 for a newcomer towards 1."""
        passed = self._passed(peer)
        return passed / (passed + HALF_TRUST)

    def weights(self, peers: Iterable[PeerId]) -> dict[PeerId, float]:
        """Return the weight of each peer's speed, relative to the most trusted of them, which has 1."""
        weights = {peer: NEWCOMER_WEIGHT + (1 - NEWCOMER_WEIGHT) * self.trust(peer) for peer in peers}
        most = max(weights.values(), default=1.0)
        return {peer: weight / most for peer, weight in weights.items()}

    def pass_audit(self, peer: PeerId, positions: int) -> None:
        """Record that `positions` positions of a peer were found right."""
        known = self._aged(peer)
        known.passed += positions
        known.audited += positions

    def halve_trust(self, peer: PeerId) -> None:
        """Halve the trust of a peer after a near miss that may be its own or another peer's."""
        self._aged(peer).passed /= 2

    def near_miss(self, peer: PeerId, positions: int, text: bytes) -> bool:
        """Record a near miss in a text of `positions` positions, and halve the peer's trust.

        `text` is a digest of the text up to the position that lies farthest off. A machine that rounds otherwise than others
        may do so there each time, so a text counts a quarter if it comes again. Returns whether the peer now has more near
        misses than chance explains, so that it should be shunned.
        """
        known = self._aged(peer)
        known.passed /= 2
        weight = REPEATED if text in known.near_texts else 1.0
        if weight == 1.0:
            known.near_texts = (*known.near_texts, text)[-MAX_NEAR_TEXTS:]
        known.near_misses += weight
        known.audited += weight * positions
        return are_too_many(known.near_misses, known.audited)

    def forfeit(self, peer: PeerId) -> None:
        """Clear the passed positions of a peer that did not account for its work, which may not be its fault."""
        if peer in self._peers:
            self._entry(peer).passed = 0.0

    def doubt(self, peer: PeerId, other: str) -> bool:
        """Record that `peer` contradicts `other`, where one of the two is wrong. Returns whether its doubts now get it
        shunned."""
        known, now = self._entry(peer), self._now()
        known.doubts = {**{who: at for who, at in known.doubts.items() if at > now - DOUBT_S}, other: now}
        if len(known.doubts) < DOUBTS:
            return False
        self.shun(peer)
        return True

    def accused_in_vain(self, author: PeerId, accused: PeerId) -> None:
        """Doubt the author of an accusation, because the accused peer passed every audit. Repeated accusations get the
        author shunned."""
        if self.doubt(author, f"accusation of {accused}"):
            log.warning("peer %s accused several honest peers: it is left out from now on", author)

    def shun(self, peer: PeerId) -> None:
        """Exclude a peer for a week, because it computed falsely. Afterwards it starts as a newcomer."""
        known = self._entry(peer)
        known.passed, known.shunned_until, known.doubts = 0.0, self._now() + SHUN_S, {}
        known.near_misses, known.audited, known.near_texts = 0.0, 0.0, ()

    def save(self) -> None:
        """Write the file if anything changed. A failure is logged."""
        if self._changed:
            self._changed = False
            try_to_keep(self._path, self._peers, "what audits have found is")

    async def store(self) -> None:
        """Write the file as `save` does, on a thread."""
        await asyncio.to_thread(self.save)

    def _passed(self, peer: PeerId) -> float:
        known = self._peers.get(peer)
        return 0.0 if known is None else known.passed * 0.5 ** max(0.0, (self._now() - known.at) / HALF_LIFE_S)

    def _aged(self, peer: PeerId) -> PeerStanding:
        """Return the entry of a peer that is about to change, with its counts decayed by their half-life to now."""
        known, now = self._entry(peer), self._now()
        left = 0.5 ** max(0.0, (now - known.at) / HALF_LIFE_S)
        known.passed, known.near_misses, known.audited = (
            left * count for count in (known.passed, known.near_misses, known.audited)
        )
        known.at = now
        return known

    def _entry(self, peer: PeerId) -> PeerStanding:
        """Return the entry of a peer that is about to change. If the table is full, the least important peer is
        dropped."""
        self._changed = True
        if peer not in self._peers and len(self._peers) >= MAX_PEERS:
            now = self._now()
            least = min(self._peers, key=lambda one: (self._peers[one].shunned_until > now, self._passed(one)))
            del self._peers[least]
        return self._peers.setdefault(peer, PeerStanding())


def are_too_many(near_misses: float, positions: float) -> bool:
    """Return whether `near_misses` in `positions` audited positions are too many.

    They are if there are at least `NEAR_MISSES` and an honest peer has as many with a probability below `CHANCE`.
    """
    if near_misses < NEAR_MISSES:
        return False
    expected = NEAR_MISS_RATE * positions
    below = math.fsum(expected**count / math.factorial(count) for count in range(math.floor(near_misses)))
    return 1 - math.exp(-expected) * below < CHANCE
