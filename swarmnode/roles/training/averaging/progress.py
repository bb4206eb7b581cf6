"""Progress: what a peer was last heard to do in an all-reduce, and how long those who need something of it wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.errors import PeerError, PeerLost
from swarmnode.net.interfaces import PeerId


@dataclass(frozen=True)
class Patience:
    """For how long a peer may do nothing, in seconds: `still_s` where it says nothing either, `excused_s` while it is held up
    by others, or its chunks are on their way: whoever holds it up is found before, and a slow link has brought a chunk by then."""

    still_s: float
    excused_s: float


class Progress:
    """One peer in one attempt. What counts is what it does (chunks, grants): a peer whose links answer PING may stand still.

    `patience()` is asked at every wait, for links are measured meanwhile; `moving()` says whether chunks are on their way.
    """

    def __init__(self, peer: PeerId, patience: Callable[[], Patience], moving: Callable[[], bool]) -> None:
        self.peer = peer
        self.failure: PeerError | None = None
        self.waiting_since_s: float | None = None  # somebody here waits for it
        self._patience = patience
        self._moving = moving
        self._clock = asyncio.get_running_loop().time
        self._acted_at_s = self._excused_at_s = self._clock()
        self._waiters: list[asyncio.Future[None]] = []  # in the order in which they came

    def __repr__(self) -> str:
        state = "failed" if self.failure else "awaited" if self._waiters else "idle"
        return f"<Progress of {self.peer}: {state}, did something {self._clock() - self._acted_at_s:.1f} s ago>"

    def acted(self) -> None:
        """It sent a chunk, or granted one."""
        self._acted_at_s = self._excused_at_s = self._clock()
        self._wake()

    def excused(self) -> None:
        """It says that it is held up by others."""
        self._excused_at_s = self._clock()

    def fail(self, error: PeerError) -> None:
        """Nothing comes of it any more. The first error stands."""
        self.failure = self.failure or error
        self._wake()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for the peer to make `condition` true. Raises its failure; PeerLost with its name where it stands still."""
        began_s = self._clock()
        while not condition():
            if self.failure is not None:
                raise self.failure
            if self._moving():
                self.excused()
            limit_s = self._limit_s(began_s)
            if self._clock() >= limit_s:
                stood_s = self._clock() - max(began_s, self._acted_at_s)
                raise PeerLost(f"peer {self.peer} stands still: {what} for {stood_s:.1f} s", peer=self.peer)
            self.waiting_since_s = began_s
            try:
                await self._change(limit_s)
            finally:
                self.waiting_since_s = None
            if self._clock() - limit_s > self._patience().still_s / 2:
                began_s = self._clock()  # it was us who slept (a suspended process, a blocked loop)

    def _limit_s(self, began_s: float) -> float:
        patience = self._patience()
        still_s = max(began_s, self._excused_at_s) + patience.still_s
        return min(still_s, max(began_s, self._acted_at_s) + patience.excused_s)

    async def _change(self, until_s: float) -> None:
        """Wait until something is heard of the peer, or a moment has come."""
        future = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        try:
            await asyncio.wait([future], timeout=max(0.0, until_s - self._clock()))
        finally:
            self._waiters.remove(future)

    def _wake(self) -> None:
        for future in self._waiters:
            if not future.done():
                future.set_result(None)
