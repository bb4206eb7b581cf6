"""What sessions are promised of cache and journal memory, and who gives way to whom when there is no more.

Memory goes to whoever asks for as long as there is some. Then it is shared max-min fairly (Bertsekas and Gallager, Data
Networks, 1992, section 6.5): first between groups of peers, since one machine may be many peers, then between the peers of a
group. A session gives way only to somebody who has less than its peer has, also with what is asked for; so it is never taken
from two in turn. One that computes gives way only to somebody who has less than half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from swarmnode.compute.serving.cache import CacheBudget, Claim, OutOfCache
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation
from swarmnode.net.interfaces import PeerId
from swarmnode.net.limits.address_group import Claimant

BUSY_WEIGHT = 2  # how many times as much a peer must have for a session of it to be cut off in the middle of its work


@dataclass(frozen=True)
class Promise:
    """What one session of a peer may take: of the cache on each device that it is computed on, and of the host for its journal."""

    claimant: Claimant
    cache_bytes: tuple[int, ...]  # by device
    journal: Reservation

    @property
    def total_bytes(self) -> int:
        """Of both kinds."""
        return sum(self.cache_bytes) + self.journal.size_bytes


class SessionMemory:
    """The promises to sessions that are computed together, by session key. `budgets` are of their devices, `ledger` the host's."""

    def __init__(self, budgets: Sequence[CacheBudget], ledger: MemoryLedger) -> None:
        self._budgets = budgets
        self._ledger = ledger
        self._promises: dict[int, Promise] = {}

    def __repr__(self) -> str:
        return f"<SessionMemory of {len(self._promises)} sessions, {self._budgets!r}>"

    def __len__(self) -> int:
        return len(self._promises)

    def __contains__(self, key: int) -> bool:
        return key in self._promises

    def take(self, key: int, claimant: Claimant, *, cache_bytes: tuple[int, ...], journal_bytes: int) -> bool:
        """Return whether there is room for a session, new or already here, to have so much. If not, what it had stays promised."""
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

    def cache_bytes(self, key: int) -> tuple[int, ...]:
        """What a session is promised of the cache, by device."""
        return self._promises[key].cache_bytes

    def release(self, key: int) -> None:
        """A session is over."""
        self._promises.pop(key).journal.release()
        self._claim()

    def _claim(self) -> None:
        """Of each device what all sessions are promised there. Raises OutOfCache where one of them has no room; to claim less again
        never fails."""
        promised = [promise.cache_bytes for promise in self._promises.values()]
        for device, budget in enumerate(self._budgets):
            budget.claim(Claim.PROMISED, sum(cache_bytes[device] for cache_bytes in promised))

    def who_gives_way(
        self, asker: Claimant, cache_bytes: tuple[int, ...], journal_bytes: int, idle: Sequence[int]
    ) -> list[int]:
        """The sessions to be ended so that somebody may have one of this size; none where that is not to be had.

        `idle` are the sessions that do nothing now, the one that has done nothing for the longest first.
        """
        asked_bytes = sum(cache_bytes) + journal_bytes
        lacking = [
            asked - free for asked, free in zip(self._taken(cache_bytes, journal_bytes), self._free, strict=True)
        ]
        held = _Shares(self._promises.values())
        busy = [key for key in reversed(self._promises) if key not in idle]  # who came last goes first
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
                held.take(promise)
                freed = self._taken(promise.cache_bytes, promise.journal.size_bytes)
                lacking = [lack - size for lack, size in zip(lacking, freed, strict=True)]
        return ended if max(lacking) <= 0 else []

    def _taken(self, cache_bytes: tuple[int, ...], journal_bytes: int) -> tuple[int, ...]:
        """What a session takes of each device's cache, and of the host, in whose memory some of these may be."""
        near = (size for size, budget in zip(cache_bytes, self._budgets, strict=True) if budget.is_in(self._ledger))
        return *cache_bytes, journal_bytes + sum(near)

    @property
    def _free(self) -> tuple[float, ...]:
        return *(budget.free_bytes for budget in self._budgets), self._ledger.free_bytes

    def _helps(self, key: int, lacking: Sequence[float]) -> bool:
        """Whether a session has something of what is lacking."""
        promise = self._promises[key]
        freed = self._taken(promise.cache_bytes, promise.journal.size_bytes)
        return any(size > 0 and lack > 0 for size, lack in zip(freed, lacking, strict=True))


class _Shares:
    """What peers and groups of peers hold."""

    def __init__(self, promises: Iterable[Promise]) -> None:
        self._by_peer: Counter[PeerId] = Counter()
        self._by_group: Counter[str] = Counter()
        for promise in promises:
            self._by_peer[promise.claimant.peer] += promise.total_bytes
            self._by_group[promise.claimant.group] += promise.total_bytes

    def take(self, promise: Promise) -> None:
        self._by_peer[promise.claimant.peer] -= promise.total_bytes
        self._by_group[promise.claimant.group] -= promise.total_bytes

    def excess_bytes(self, holder: Claimant, asker: Claimant, weight: int, asked_bytes: int) -> int:
        """How much more a peer holds than `weight` times what the asker would; of two groups, how much more the groups."""
        if holder.group == asker.group:
            return self._by_peer[holder.peer] - weight * (self._by_peer[asker.peer] + asked_bytes)
        return self._by_group[holder.group] - weight * (self._by_group[asker.group] + asked_bytes)
