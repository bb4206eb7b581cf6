"""What a peer does about its own bugs: it ends, with the reason, rather than seem to be there and answer nobody."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from swarmnode.errors import LocalError, PeerError
from swarmnode.net.tasks import cancel_and_wait

T = TypeVar("T")

# As the intensity and period of an Erlang supervisor: one bug in one conversation costs that conversation alone.
MOST_CRASHES = 5
PERIOD_S = 60.0


class Supervisor:
    """Hears of every task of a peer that died of an error nobody expected. Whoever runs the peer waits for `broken`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.failure: LocalError | None = None
        self._clock = clock
        self._crashed_at_s: deque[float] = deque(maxlen=MOST_CRASHES)
        self._broken = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Supervisor {self.failure or 'of a peer that lives'}>"

    def ends_peer(self, error: BaseException) -> None:
        """A task died without which the peer is none. Of several such errors the first one is the reason."""
        if self.failure is None:
            text = f"a part of this peer died of a mistake in swarmnode: {error!r}. Please report it with the log, and start again"
            self.failure = error if isinstance(error, LocalError) else LocalError(text)
            self._broken.set()

    def ends_conversation(self, error: BaseException) -> None:
        """A conversation died, and both its ends know. Where that happens again and again, the peer is of no use to anybody; but
        not by what others do."""
        if isinstance(error, PeerError):
            return
        now_s = self._clock()
        self._crashed_at_s.append(now_s)
        if len(self._crashed_at_s) == MOST_CRASHES and now_s - self._crashed_at_s[0] <= PERIOD_S:
            self.ends_peer(error)

    def check(self) -> None:
        """Raises LocalError where the peer is broken."""
        if self.failure is not None:
            raise self.failure

    async def broken(self) -> LocalError:
        """Wait until the peer is broken: why."""
        await self._broken.wait()
        assert self.failure is not None
        return self.failure

    async def watch(self, work: Awaitable[T]) -> T:
        """The result of `work`; where the peer breaks first, `work` is cancelled and LocalError raised."""
        task, broken = asyncio.ensure_future(work), asyncio.ensure_future(self.broken())
        try:
            await asyncio.wait({task, broken}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise broken.result()
            return task.result()
        finally:
            await cancel_and_wait(task, broken)
