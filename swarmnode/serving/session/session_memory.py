"""Memory promised to sessions for caches and journals, and the choice of sessions to end if there is no more.

Every asker gets memory while there is some. Then memory is shared max-min fairly (Bertsekas and Gallager, Data
Networks, 1992, section 6.5): first between groups of peers, since one machine may be many peers, then between the peers
of a group. A session is ended only for a peer that would hold less than the session's peer, counting the request. So
two peers never take from each other in turn. A session that is computing is ended only for a peer that would hold less
than half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from swarmnode.compute.serving.cache import CacheBudget, Claim, OutOfCache
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.interfaces import PeerId

BUSY_WEIGHT = 2  # a peer must hold this many times as much for its busy session to be ended


@dataclass(frozen=True)
class Promise:
    """Memory that one session of a peer may take: cache on each device that computes it, and host memory for its
    journal."""

    claimant: Claimant
    cache_bytes: tuple[int, ...]  # by device
    journal: Reservation

    @property
    def total_bytes(self) -> int:
        """Bytes of cache and journal together."""
        return sum(self.cache_bytes) + self.journal.size_bytes


class SessionMemory:
    """Promises to sessions that are computed together, by session key. `budgets` are those of their devices, `ledger`
    is the host's."""

    def __init__(self, budgets: Sequence[CacheBudget], ledger: MemoryLedger) -> None:
        self._budgets = budgets
        self._ledger = ledger
        self._promises: dict[int, Promise] = {}

    def __len__(self) -> int:
        return len(self._promises)

    def __contains__(self, key: int) -> bool:
        return key in self._promises

    def reserve(self, key: int, claimant: Claimant, *, cache_bytes: tuple[int, ...], journal_bytes: int) -> bool:
        """Promise memory to a session, new or already here, and return whether there was room.

        If there was not, the earlier promise stays. A promise never shrinks.
        """
        had = self._promises.get(key)
        promise = had or Promise(claimant, (0,) * len(cache_bytes), self._ledger.count(Account.JOURNALS))
        had_journal_bytes = promise.journal.size_bytes
        try:
            promise.journal.resize(max(had_journal_bytes, journal_bytes))
        except Full:
            return False
        self._promises[key] = replace(promise, cache_bytes=tuple(map(max, promise.cache_bytes, cache_bytes)))
        try:
            self._claim()
        except OutOfCache:
            promise.journal.resize(had_journal_bytes)
            self._promises[key] = promise
            if had is None:
                del self._promises[key]
            self._claim()
            return False
        return True

    @property
    def promises(self) -> list[Promise]:
        """Promises to all sessions."""
        return list(self._promises.values())

    def cache_bytes(self, key: int) -> tuple[int, ...]:
        """Return the bytes of cache promised to a session, by device."""
        return self._promises[key].cache_bytes

    def release(self, key: int) -> None:
        """Release the memory that was promised to a session."""
        self._promises.pop(key).journal.release()
        self._claim()

    def _claim(self) -> None:
        """Claim on each device the sum of all promises. Raises OutOfCache if a device has no room; claiming less never
        fails."""
        promised = [promise.cache_bytes for promise in self._promises.values()]
        for device, budget in enumerate(self._budgets):
            budget.claim(Claim.PROMISED, sum(cache_bytes[device] for cache_bytes in promised))

    def who_gives_way(
        self, asker: Claimant, cache_bytes: tuple[int, ...], journal_bytes: int, idle: Sequence[int]
    ) -> list[int]:
        """Return the keys of sessions to end so that `asker` can have a session of this size; empty if that is
        impossible.

        `idle` holds the keys of the sessions that do nothing now, the longest idle first.
        """
        asked_bytes = sum(cache_bytes) + journal_bytes
        lacking = [
            asked - free
            for asked, free in zip(self._reserved_bytes(cache_bytes, journal_bytes), self._free, strict=True)
        ]
        held = Shares(self._promises.values())
        busy = [key for key in reversed(self._promises) if key not in idle]  # the latest session goes first
        ended: list[int] = []
        for keys, weight in ((list(idle), 1), (busy, BUSY_WEIGHT)):
            while max(lacking) > 0 and (helpful := [key for key in keys if self._helps(key, lacking)]):
                key = max(
                    helpful, key=lambda key: held.excess_bytes(self._promises[key].claimant, asker, weight, asked_bytes)
                )
                promise = self._promises[key]
                if held.excess_bytes(promise.claimant, asker, weight, asked_bytes) <= 0:
                    break
                keys.remove(key)
                ended.append(key)
                held.subtract(promise)
                freed = self._reserved_bytes(promise.cache_bytes, promise.journal.size_bytes)
                lacking = [lack - size for lack, size in zip(lacking, freed, strict=True)]
        return ended if max(lacking) <= 0 else []

    def _reserved_bytes(self, cache_bytes: tuple[int, ...], journal_bytes: int) -> tuple[int, ...]:
        """Return the bytes that a session takes of each device's cache and of the host, whose memory may hold some of
        the caches."""
        near = (size for size, budget in zip(cache_bytes, self._budgets, strict=True) if budget.ledger is self._ledger)
        return *cache_bytes, journal_bytes + sum(near)

    @property
    def _free(self) -> tuple[float, ...]:
        return *(budget.free_bytes for budget in self._budgets), self._ledger.free_bytes

    def _helps(self, key: int, lacking: Sequence[float]) -> bool:
        """Return whether ending a session frees memory that is lacking."""
        promise = self._promises[key]
        freed = self._reserved_bytes(promise.cache_bytes, promise.journal.size_bytes)
        return any(size > 0 and lack > 0 for size, lack in zip(freed, lacking, strict=True))


class Held(Protocol):
    """Memory that a node holds for a peer: a session's, or an adapter's that the peer tunes."""

    @property
    def claimant(self) -> Claimant:
        """Peer that the memory is held for, and its group."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all kinds of memory."""


class Shares:
    """Bytes that are held for each peer, and for each group of peers."""

    def __init__(self, holdings: Iterable[Held]) -> None:
        self._by_peer: Counter[PeerId] = Counter()
        self._by_group: Counter[str] = Counter()
        for one in holdings:
            self._by_peer[one.claimant.peer] += one.total_bytes
            self._by_group[one.claimant.group] += one.total_bytes

    def subtract(self, holding: Held) -> None:
        """Count a holding no more."""
        self._by_peer[holding.claimant.peer] -= holding.total_bytes
        self._by_group[holding.claimant.group] -= holding.total_bytes

    def size_bytes(self, claimant: Claimant) -> tuple[int, int]:
        """Return the bytes that are held for a peer's group, and for the peer."""
        return self._by_group[claimant.group], self._by_peer[claimant.peer]

    def excess_bytes(self, holder: Claimant, asker: Claimant, weight: int, asked_bytes: int) -> int:
        """Return by how many bytes the share of `holder` exceeds `weight` times that of `asker` with `asked_bytes` more.

        Peers of the same group are compared with each other, otherwise their groups.
        """
        if holder.group == asker.group:
            return self._by_peer[holder.peer] - weight * (self._by_peer[asker.peer] + asked_bytes)
        return self._by_group[holder.group] - weight * (self._by_group[asker.group] + asked_bytes)
