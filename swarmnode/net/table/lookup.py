"""Look-up in the table: finds the peers nearest to some keys step by step, and merges the records of all of them.

No answer is trusted alone: a peer that names only its friends, or withholds records, is one of several. The peers near a key may
all belong to one stranger, since identities can be tried until they lie there. Therefore only GROUP_PEERS peers of one address
group of the open internet are asked while there are others. A peer named by such a group alone counts as one of it until it has
answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarmnode.net.interfaces import PeerId, Record
from swarmnode.net.table.routing_table import BUCKET_PEERS, GROUP_PEERS, diverse, node_id

AT_ONCE = 4  # calls
MAX_ASKED = 48  # peers for one key, however many are named
MAX_KNOWN = 512
MAX_FIND_KEYS = 8  # in one call, since its answer has a bound


Records = Mapping[bytes, Record]


@dataclass(frozen=True)
class FoundThere:
    """Answer of one peer for a key: its records, and the peers that it knows nearer to the key."""

    records: Records
    nearer: Sequence[PeerId]


Ask = Callable[[PeerId, Sequence[int]], Awaitable[Sequence[FoundThere] | None]]
"""Function of (peer, places of keys) that returns the peer's answer for each key; None if it does not answer."""

GroupOf = Callable[[PeerId], str]

EnoughThere = Callable[[int, Records], bool]
"""Function of (place of a key, records found under it) that returns whether no more peers need be asked."""


@dataclass
class _Search:
    """State of a search for one key in the hash table: known, asked and answering peers, and the records found."""

    known: dict[PeerId, set[str]]  # with the address groups of the peers that named them
    records: dict[bytes, Record]
    asked: set[PeerId] = field(default_factory=set)
    silent: set[PeerId] = field(default_factory=set)
    answered: set[PeerId] = field(default_factory=set)
    done: bool = False

    @property
    def waits(self) -> bool:
        """Whether a peer that was asked may still answer."""
        return len(self.asked) > len(self.answered) + len(self.silent)

    def take(self, found: FoundThere, named_by: str, *, own: PeerId) -> None:
        for subkey, record in found.records.items():
            known = self.records.get(subkey)
            if known is None or known.expires_at < record.expires_at:
                self.records[subkey] = record
        for peer in found.nearer[:BUCKET_PEERS]:
            if peer != own and (peer in self.known or len(self.known) < MAX_KNOWN):
                self.known.setdefault(peer, set()).add(named_by)


class LookUp:
    """Look-up of some keys by the peer `own`. `kept` has the records that `own` keeps under each key; the look-up starts with
    them.

    With `enough` the peers near a key are asked one after another until it returns true. After one of them was silent they are
    asked in parallel, as without `enough`, since waiting for each missing peer in turn would take too long.
    """

    def __init__(
        self,
        own: PeerId,
        kept: Mapping[int, Records],
        start: Callable[[int], Iterable[PeerId]],
        ask: Ask,
        group_of: GroupOf,
        *,
        enough: EnoughThere | None = None,
    ) -> None:
        self._searches = {
            key: _Search({peer: set() for peer in start(key)}, dict(records)) for key, records in kept.items()
        }
        self._own = own
        self._ask = ask
        self._group_of = group_of
        self._enough = enough
        for key, search in self._searches.items():
            search.done = self._has_enough(key, search)

    def records(self, key: int) -> dict[bytes, Record]:
        """Return the records found under a key, by subkey, from all peers that answered."""
        return self._searches[key].records

    def nearest(self, key: int, count: int) -> list[PeerId]:
        """Return the nearest `count` peers that answered, of different address groups if possible."""
        search = self._searches[key]
        answered = sorted(search.answered, key=lambda peer: node_id(peer) ^ key)
        return diverse(answered, {peer: self._group_of(peer) for peer in answered}, count)

    async def run(self) -> LookUp:
        """Ask peers until no nearer ones are known, or until there is enough; return self."""
        calls: dict[asyncio.Future[Sequence[FoundThere] | None], tuple[PeerId, list[int]]] = {}
        try:
            while True:
                while len(calls) < AT_ONCE and (question := self._next()) is not None:
                    calls[asyncio.ensure_future(self._ask(*question))] = question
                if not calls:
                    return self
                done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                for call in done:
                    self._take(*calls.pop(call), call.result())
        finally:
            for call in calls:
                call.cancel()

    def _next(self) -> tuple[PeerId, list[int]] | None:
        """Return the peer to ask next and the keys to ask for, and note that it is asked: the nearest peer to one key, that key,
        and others that it is near to, at most MAX_FIND_KEYS in all. None if there is no peer to ask now."""
        fronts = {key: self._front(key) for key, search in self._searches.items() if not search.done}
        for key, front in fronts.items():
            if front:
                peer = front[0]
                others = [other for other, nearest in fronts.items() if other != key and peer in nearest]
                keys = [key, *others][:MAX_FIND_KEYS]
                for each in keys:
                    self._searches[each].asked.add(peer)
                return peer, keys
        return None

    def _has_enough(self, key: int, search: _Search) -> bool:
        return self._enough is not None and self._enough(key, search.records)

    def _front(self, key: int) -> list[PeerId]:
        """Return the peers nearest to a key that are to be asked now, nearest first."""
        search = self._searches[key]
        one_by_one = self._enough is not None and not search.silent
        if len(search.asked) >= MAX_ASKED or (one_by_one and search.waits):
            return []
        living = sorted(search.known.keys() - search.silent, key=lambda peer: node_id(peer) ^ key)
        groups = {peer: self._supposed_group(search, peer) for peer in living}
        return [peer for peer in diverse(living, groups, BUCKET_PEERS) if peer not in search.asked]

    def _supposed_group(self, search: _Search, peer: PeerId) -> str:
        """Return the address group of a peer. Before its answer: the group of the peers that named it, if that is one group with
        many answers."""
        if peer not in search.answered and len(search.known[peer]) == 1:
            (group,) = search.known[peer]
            if sum(self._group_of(other) == group for other in search.answered) >= GROUP_PEERS:
                return group
        return self._group_of(peer)

    def _take(self, peer: PeerId, keys: Sequence[int], found: Sequence[FoundThere] | None) -> None:
        group = self._group_of(peer)
        for number, key in enumerate(keys):
            search = self._searches[key]
            if found is None:
                search.silent.add(peer)
            else:
                search.answered.add(peer)
                search.take(found[number], group, own=self._own)
                search.done = self._has_enough(key, search)
