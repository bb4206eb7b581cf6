"""The last hour of a swarm, sampled: how fast it answered here, who was there, and how a training went."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.gateway.page.replies import HistoryReply, HistorySample
from swarmnode.metrics import table
from swarmnode.metrics.histogram import Histogram

PERIOD_S = 10.0
KEPT = 360  # samples: an hour

LossOf = Callable[[str], float | None]
"""The loss of the last step of the swarm with this id, where a node of this machine trains it; called in a thread"""


class SwarmHistory:
    """Of one swarm, while `record` runs."""

    def __init__(self, client: SwarmClient, loss_of: LossOf, *, now: Callable[[], float] = time.time) -> None:
        self._client = client
        self._loss_of = loss_of
        self._now = now
        self._samples: deque[HistorySample] = deque(maxlen=KEPT)
        self._tokens = self._generated()

    def __repr__(self) -> str:
        return f"<SwarmHistory of {len(self._samples)} samples>"

    def reply(self) -> HistoryReply:
        """All of it."""
        return HistoryReply(period_s=PERIOD_S, samples=list(self._samples))

    async def record(self) -> None:
        """Take samples, for ever."""
        while True:
            await asyncio.sleep(PERIOD_S)
            status, tokens = self._client.status(), self._generated()
            self._samples.append(
                HistorySample(
                    at=self._now(),
                    tokens_per_s=(tokens - self._tokens) / PERIOD_S,
                    sessions=len(self._client.running),
                    peers=len(status["peers"]),
                    missing=len(status["missing"]),
                    training_step=status["training_step"],
                    loss=await asyncio.to_thread(self._loss_of, status["swarm"]),
                )
            )
            self._tokens = tokens

    def _generated(self) -> float:
        """Tokens that came so far."""
        counts = (one.value for one in self._client.readings() if one.metric is table.CLIENT_TOKENS)
        return sum(count for count in counts if not isinstance(count, Histogram))
