"""Outgoing sums: agreed parts that a member hands to others, kept until the slowest of them has taken them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from swarmnode.compute.training.averaging.parts import Encoded


class OutgoingSums:
    """Of one round. `parts`: all of them by number, in the order in which each of the `receivers` takes its own.

    No more than `ahead` of them are here, the first that not everybody has taken among them: sums come in any order where
    several clusters agree on them, and who waits for the first one is never held up by those behind it.
    """

    def __init__(self, parts: Sequence[int], receivers: Mapping[str, Iterable[int]], ahead: int) -> None:
        self._place = {number: place for place, number in enumerate(parts)}
        self._parts = parts
        self._missing = Counter(number for numbers in receivers.values() for number in numbers)
        self._ahead = ahead
        self._first = 0  # the place of the first part that somebody waits for
        self._sums: dict[int, Encoded] = {}
        self._changed = asyncio.Condition()

    def __repr__(self) -> str:
        return f"<OutgoingSums, {self._first} of {len(self._parts)} taken by all, {len(self._sums)} here>"

    def hands_on(self, part: int) -> bool:
        """Whether it is one of them."""
        return part in self._place

    async def put(self, part: int, settled: Encoded) -> None:
        """Hand on a part as soon as there is room for it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._place[part] < self._first + self._ahead)
            self._sums[part] = settled
            self._advance()

    async def get(self, part: int) -> Encoded:
        """Wait for a part."""
        async with self._changed:
            await self._changed.wait_for(lambda: part in self._sums)
            return self._sums[part]

    async def taken(self, part: int) -> None:
        """One of those who are to have it has it."""
        async with self._changed:
            self._missing[part] -= 1
            self._advance()

    def _advance(self) -> None:
        """Drop what everybody has, from the first part on."""
        while self._first < len(self._parts):
            part = self._parts[self._first]
            if part not in self._sums or self._missing[part] > 0:
                break
            del self._sums[part]
            self._first += 1
        self._changed.notify_all()
