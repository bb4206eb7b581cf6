"""Fair queueing: the keys take turns at the places to generate, however many requests wait under one key."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator

from swarmnode.gateway.access.keys import ApiKey
from swarmnode.gateway.http.api_error import too_many

RETRY_S = 2.0


class FairQueue:
    """Queue for `running` places; each key may take as many as its limits allow. At most `waiting` requests of one key may
    wait, each for `wait_s` seconds."""

    def __init__(self, *, running: int, waiting: int, wait_s: float) -> None:
        self._places = running
        self._max_waiting = waiting
        self._wait_s = wait_s
        self._running: Counter[ApiKey] = Counter()
        self._waiting: dict[ApiKey, deque[asyncio.Future[None]]] = {}  # the key with the next turn comes first

    @property
    def running(self) -> int:
        """Number of places that are taken."""
        return self._running.total()

    @property
    def waiting(self) -> int:
        """Number of waiting requests, all keys together."""
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def place(self, key: ApiKey) -> AsyncIterator[None]:
        """Hold a place while the context lasts. Raises ApiError (429) if the key has too many waiting requests, or no place becomes
        free in time."""
        await self._enter(key)
        try:
            yield
        finally:
            self._leave(key)

    async def _enter(self, key: ApiKey) -> None:
        queue = self._waiting.setdefault(key, deque())
        if len(queue) >= self._max_waiting:
            raise too_many(f"{len(queue)} requests of this key are already waiting: try again later", RETRY_S)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._give_places()
        if turn.done():
            return
        try:
            await asyncio.wait_for(asyncio.shield(turn), self._wait_s)
        except asyncio.TimeoutError:
            self._give_up(key, turn)
            raise too_many(f"no place became free within {self._wait_s:.0f} s: try again later", RETRY_S) from None
        except BaseException:
            self._give_up(key, turn)
            raise

    def _give_up(self, key: ApiKey, turn: asyncio.Future[None]) -> None:
        if turn.done():  # the place came in the same moment
            self._leave(key)
        else:
            turn.cancel()
            self._waiting[key].remove(turn)
            if not self._waiting[key]:
                del self._waiting[key]

    def _leave(self, key: ApiKey) -> None:
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
        self._give_places()

    def _give_places(self) -> None:
        while self.running < self._places and (key := self._next()) is not None:
            queue = self._waiting.pop(key)
            self._running[key] += 1
            queue.popleft().set_result(None)
            if queue:
                self._waiting[key] = queue  # behind the others

    def _next(self) -> ApiKey | None:
        return next((key for key in self._waiting if self._may_run(key)), None)

    def _may_run(self, key: ApiKey) -> bool:
        return bool(self._waiting[key]) and self._running[key] < (key.limits.concurrent or self._places)
