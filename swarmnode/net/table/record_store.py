"""Records that this peer keeps for the table, bounded, and shared fairly among the peers that stored them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping

from swarmnode.net.interfaces import MAX_RECORD_BYTES, Record
from swarmnode.net.limits.address_group import Claimant
from swarmnode.net.limits.fair_share import FairShare

MAX_RECORDS = 4096
MAX_SUBKEYS = 256  # of a key
MAX_SUBKEY_BYTES = 256
PACKING_BYTES = 32  # overhead of a record in an answer: expiry, lengths

Slot = tuple[int, bytes]
"""Place of a key, and a subkey."""


class RecordStore:
    """Store with the record of each subkey that expires last.

    If it is full, writers with most records give way to writers with few. So a flood from invented peers pushes out only its own
    records, and records from before it stay.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._keys: dict[int, dict[bytes, Record]] = {}
        self._soonest_end = math.inf  # unix time; no record expires before it
        self._all: FairShare[Slot] = FairShare(MAX_RECORDS)
        self._of_key: dict[int, FairShare[Slot]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, key: int) -> Mapping[bytes, Record]:
        """Return the unexpired records under a key, by subkey."""
        self._expire(key)
        return dict(self._keys.get(key, {}))

    def some(self, key: int, room_bytes: int) -> dict[bytes, Record]:
        """Return as many records under a key as fit into `room_bytes`, the shortest first, so that long records cannot hide others.

        Of MAX_SUBKEYS records, a record that is no longer than its share of the room is always included.
        """
        found: dict[bytes, Record] = {}
        for subkey, record in sorted(self.get(key).items(), key=lambda item: len(item[1].value)):
            room_bytes -= len(subkey) + len(record.value) + PACKING_BYTES
            if room_bytes < 0:
                break
            found[subkey] = record
        return found

    def items(self) -> Iterator[tuple[int, bytes, Record]]:
        """Yield all unexpired records, with key and subkey."""
        for key in list(self._keys):
            for subkey, record in self.get(key).items():
                yield key, subkey, record

    def store(self, key: int, subkey: bytes, value: bytes, expires_at: float, claimant: Claimant) -> bool:
        """Keep a valid record for `claimant`. Returns False if it is too large or expired, one that expires no earlier is known, or
        there is no room."""
        if len(value) > MAX_RECORD_BYTES or len(subkey) > MAX_SUBKEY_BYTES or expires_at <= self._clock():
            return False
        known = self._keys.get(key, {}).get(subkey)
        if known is not None and known.expires_at >= expires_at:
            return False
        if known is None and not self._take_place((key, subkey), claimant):
            return False
        if known is not None and subkey == claimant.peer.encode():  # counts for its author, whichever peer brought it
            self._all.move((key, subkey), claimant)
            self._of_key[key].move((key, subkey), claimant)
        self._keys.setdefault(key, {})[subkey] = Record(value, expires_at)
        self._soonest_end = min(self._soonest_end, expires_at)
        return True

    def _take_place(self, slot: Slot, claimant: Claimant) -> bool:
        if len(self._all) >= MAX_RECORDS:
            self._expire_all()
        self._expire(slot[0])
        for shares in (self._of_key.setdefault(slot[0], FairShare(MAX_SUBKEYS)), self._all):
            yielding = shares.take(slot, claimant)
            if yielding is not None:
                self._remove(yielding)
            if yielding == slot:
                return False
        return True

    def _expire_all(self) -> None:
        if self._clock() < self._soonest_end:  # else each record of a flood would cost a look at all records
            return
        for key in list(self._keys):
            self._expire(key)
        ends = (record.expires_at for records in self._keys.values() for record in records.values())
        self._soonest_end = min(ends, default=math.inf)

    def _expire(self, key: int) -> None:
        now = self._clock()
        for subkey, record in list(self._keys.get(key, {}).items()):
            if record.expires_at <= now:
                self._remove((key, subkey))

    def _remove(self, slot: Slot) -> None:
        key, subkey = slot
        self._all.leave(slot)
        if key in self._of_key:
            self._of_key[key].leave(slot)
        if key in self._keys:
            self._keys[key].pop(subkey, None)
        if not self._keys.get(key):
            self._keys.pop(key, None)
            if not len(self._of_key.get(key, ())):
                self._of_key.pop(key, None)
