"""Fair limits: a mapping of the latest entries, a pace by peer and address group, and places in max-min fairness.

If all places are taken, the peer with most gives one up for a peer with less.

Limits on the streams that other peers open here, before and after they have been admitted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.interfaces import PeerId, Stream

MAX_BUCKETS = 8192

Item = TypeVar("Item", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(dict[Key, Value]):
    """Mapping of at most `most` entries, ordered from the least recently set, which goes first. Set by `[key] =` only."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]


@dataclass(frozen=True)
class Pace:
    """Rate limit: `per_s` per second, and `at_once` after a rest."""

    per_s: float
    at_once: float


class FairPace:
    """Rate limit by peer and by address group, asked before work for a peer. An amount is any count: calls, bytes, frames."""

    def __init__(self, peer: Pace, group: Pace, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._peer = peer
        self._group = group
        self._clock = clock
        self._free_at_s: Recent[Hashable, float] = Recent(MAX_BUCKETS)  # when the rate has made up for all amounts

    def wait_s(self, claimant: Claimant, amount: float = 1.0, *, within_s: float = math.inf) -> float:
        """Take the amount and return the seconds to wait before the claimant's turn.

        If they are more than `within_s` nothing is taken: the refusals of one peer must not count against the others of its group.
        """
        paces: tuple[tuple[Hashable, Pace], ...] = ((claimant, self._peer), (claimant.group, self._group))
        free_at_s = {whose: self._free_after_s(whose, amount, pace) for whose, pace in paces}
        wait_s = max(0.0, max(free_at_s.values()) - self._clock())
        if wait_s <= within_s:
            for whose, at_s in free_at_s.items():
                self._free_at_s[whose] = at_s
        return wait_s

    def _free_after_s(self, whose: Hashable, amount: float, pace: Pace) -> float:
        rested_s = self._clock() - pace.at_once / pace.per_s
        return max(self._free_at_s.get(whose, rested_s), rested_s) + amount / pace.per_s


class FairShare(Generic[Item]):
    """Places in max-min fairness, counted by address group and, within one, by peer. A flood takes only places that no other peer
    wants."""

    def __init__(self, places: int, *, of_peer: int | None = None, of_group: int | None = None) -> None:
        self._places = places
        self._of_peer = math.inf if of_peer is None else of_peer
        self._of_group = math.inf if of_group is None else of_group
        self._claimants: dict[Item, Claimant] = {}
        self._groups: dict[str, dict[PeerId, dict[Item, None]]] = {}  # items, the oldest first
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._claimants)

    def __contains__(self, item: object) -> bool:
        return item in self._claimants

    def admit(self, item: Item, claimant: Claimant) -> Item | None:
        """Give `item` a place. Returns None if a place was free, else the item that lost its place, which the caller removes:
        `item` itself if it gets none."""
        if self.held(claimant) >= self._of_peer or self._sizes.get(claimant.group, 0) >= self._of_group:
            return item
        yielding = self._yields_to(claimant) if len(self) >= self._places else None
        if len(self) >= self._places and yielding is None:
            return item
        if yielding is not None:
            self.leave(yielding)
        self._claimants[item] = claimant
        self._groups.setdefault(claimant.group, {}).setdefault(claimant.peer, {})[item] = None
        self._sizes[claimant.group] = self._sizes.get(claimant.group, 0) + 1
        return yielding

    def leave(self, item: Item) -> None:
        """Free the place of an item; no error if it has none."""
        claimant = self._claimants.pop(item, None)
        if claimant is None:
            return
        peers = self._groups[claimant.group]
        del peers[claimant.peer][item]
        self._sizes[claimant.group] -= 1
        if not peers[claimant.peer]:
            del peers[claimant.peer]
        if not peers:
            del self._groups[claimant.group], self._sizes[claimant.group]

    def move(self, item: Item, claimant: Claimant) -> None:
        """Count the item for `claimant` from now on."""
        if self._claimants[item] != claimant:
            self.leave(item)
            self.admit(item, claimant)

    def held(self, claimant: Claimant) -> int:
        """Return the number of places that a peer takes at the moment."""
        return len(self._groups.get(claimant.group, {}).get(claimant.peer, ()))

    def _yields_to(self, newcomer: Claimant) -> Item | None:
        """Return the newest item of the peer with most in the group with most; None if the newcomer would then hold more than
        they."""
        group = max(self._sizes, key=self._sizes.__getitem__)
        if self._sizes[group] <= self._sizes.get(newcomer.group, 0):
            group = newcomer.group
        peers = self._groups.get(group, {})
        peer = max(peers, key=lambda peer: len(peers[peer]), default=None)
        if peer is None or (group == newcomer.group and len(peers[peer]) <= len(peers.get(newcomer.peer, ())) + 1):
            return None
        return next(reversed(peers[peer]))


# Streams without a greeting yet; one that stays without is dropped after seconds.
HALF_OPEN, HALF_OPEN_OF_PEER, HALF_OPEN_OF_GROUP = 512, 32, 128
OPEN, OPEN_OF_PEER, OPEN_OF_GROUP = 2048, 64, 512
NEW_OF_PEER, NEW_OF_GROUP = Pace(32, 128), Pace(128, 512)  # streams


class StreamLimits:
    """Limits on incoming streams of all protocols together. Each stream takes a socket and some 128 KiB."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._half_open: FairShare[Stream] = FairShare(
            HALF_OPEN, of_peer=HALF_OPEN_OF_PEER, of_group=HALF_OPEN_OF_GROUP
        )
        self._open: FairShare[Stream] = FairShare(OPEN, of_peer=OPEN_OF_PEER, of_group=OPEN_OF_GROUP)
        self._pace = FairPace(NEW_OF_PEER, NEW_OF_GROUP, clock=clock)

    @property
    def half_open(self) -> int:
        """Number of streams that have not been greeted yet."""
        return len(self._half_open)

    def enter(self, stream: Stream) -> bool:
        """Count a new stream and return whether it may stay. A stream of the peer with most may be aborted for it."""
        claimant = Claimant(stream.group, stream.peer)
        return self._pace.wait_s(claimant, within_s=0) == 0 and _admit(self._half_open, stream, claimant)

    def let_in(self, stream: Stream) -> None:
        """Count a stream among the open ones, as its peer was admitted. It is aborted if there is no place."""
        if stream in self._half_open:
            self._half_open.leave(stream)
            if not _admit(self._open, stream, Claimant(stream.group, stream.peer)):
                stream.abort()

    def leave(self, stream: Stream) -> None:
        """Stop counting a stream. Calling it again changes nothing."""
        self._half_open.leave(stream)
        self._open.leave(stream)


def _admit(shares: FairShare[Stream], stream: Stream, claimant: Claimant) -> bool:
    yielding = shares.admit(stream, claimant)
    if yielding is not None and yielding is not stream:
        yielding.abort()
    return yielding is not stream


class CountedStream(Stream):
    """Stream counted by `limits`; None for a stream that this peer opened."""

    limits: StreamLimits | None = None

    def let_in(self) -> None:
        if self.limits is not None:
            self.limits.let_in(self)

    def release_place(self) -> None:
        if self.limits is not None:
            self.limits.leave(self)
