"""A clock that stands still until the test moves it."""

import asyncio
import heapq


class FakeClock:
    def __init__(self, start=1_790_000_000.0):
        self.now = start
        self._sleepers = []
        self._count = 0

    def time(self):
        return self.now

    async def sleep(self, seconds):
        future = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (self.now + seconds, self._count, future))
        await future

    async def advance(self, seconds):
        """Move on, waking sleepers in order, and let everything that became ready run."""
        end = self.now + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self.now, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
            await settle()
        self.now = end


async def settle():
    """Let every task that can run do so."""
    for _ in range(50):
        await asyncio.sleep(0)
