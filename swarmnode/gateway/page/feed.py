"""Feed of one swarm for the page: a picture, its changes as events, and the history of the last hour."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.gateway.http.api_error import ApiError
from swarmnode.gateway.http.event_stream import event
from swarmnode.gateway.page.replies import HistoryReply, HistorySample
from swarmnode.metrics import table
from swarmnode.metrics.metric import Histogram
from swarmnode.serving.client.generation import Generation

SWARM_PERIOD_S = 0.5  # at which changes are told together
SESSION_PERIOD_S = 0.1
KEEP_ALIVE_S = 15.0  # proxies close what is silent
KEEP_ALIVE = b": nothing new\n\n"
MAX_SESSIONS = 64
HIDDEN = ("addresses",)  # where machines are is nobody's business who looks at a page

PERIOD_S = 10.0  # of the history
KEPT = 360  # samples: an hour

Picture = dict[str, Any]

LossOf = Callable[[str], float | None]
"""The loss of the last step of the swarm with this id, if a node of this machine trains it; called in a thread"""


class SwarmHistory:
    """Samples of one swarm, taken while `record` runs."""

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


class SwarmFeed:
    """`client` is the swarm called `name`; `tells_sessions` is whether everybody may know of all of its texts."""

    def __init__(self, name: str, client: SwarmClient, history: SwarmHistory, *, tells_sessions: bool) -> None:
        self.client = client
        self.history = history
        self._name = name
        self._tells_sessions = tells_sessions
        self._ended = False
        self._status: tuple[int, Picture] = (-1, {})  # the last one, and of which revision it is

    def __repr__(self) -> str:
        return f"<SwarmFeed of {self._name}>"

    def end(self) -> None:
        """Let all streams come to their ends."""
        self._ended = True

    def picture(self) -> Picture:
        """As `SwarmReply` has it. All who look share one look at a thousand machines."""
        if self._status[0] != self.client.revision:
            status = {name: value for name, value in self.client.status().items() if name not in HIDDEN}
            self._status = (self.client.revision, status)
        return {"id": self._name, **self._status[1], "sessions": self._sessions()}

    def _sessions(self) -> list[Picture]:
        running = list(self.client.running.items())[:MAX_SESSIONS] if self._tells_sessions else []
        return [progress_of(trace, result) for trace, result in running]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """`swarm` with all of it, then `changes`: what is new, peers that are or have changed, and those that are `gone`."""
        told, revision = self.picture(), self.client.revision
        yield _event("swarm", told)
        silent_s = 0.0
        while not self._ended:
            await asyncio.sleep(SWARM_PERIOD_S)
            silent_s += SWARM_PERIOD_S
            if (self.client.revision, self._sessions()) != (revision, told["sessions"]):
                now, revision = self.picture(), self.client.revision
                if changes := changes_between(told, now):
                    yield _event("changes", changes)
                    silent_s = 0.0
                told = now
            if silent_s >= KEEP_ALIVE_S:
                yield KEEP_ALIVE
                silent_s = 0.0

    async def session_events(self, trace: str) -> AsyncGenerator[bytes, None]:
        """`session` whenever something of it has changed, then `over`. Raises ApiError (404) where nothing has this trace."""
        result = self.client.running.get(trace)
        if result is None:
            raise ApiError(404, "nothing with this trace is being written here")
        told: Picture = {}
        while not self._ended:
            is_over = trace not in self.client.running
            if (now := progress_of(trace, result)) != told:
                yield _event("session", now)
                told = now
            if is_over:
                yield _event("over", {"trace": trace})
                return
            await asyncio.sleep(SESSION_PERIOD_S)


def progress_of(trace: str, result: Generation) -> Picture:
    """As `SessionReply` has it."""
    return {
        "trace": trace,
        "route": [{"peer": hop.peer, "span": [hop.start, hop.end]} for hop in result.route],
        "tokens": len(result.ids),
        "tokens_per_s": round(result.tokens_per_s, 3),
        "reroutes": result.reroutes,
        "faults": [{"peer": peer, "cause": cause.lower()} for peer, cause in result.faults],
        "longest_stall_s": round(result.longest_stall_s, 3),
    }


def changes_between(before: Picture, after: Picture) -> Picture:
    """What is new in `after`: of `peers` those that are not as they were, and the ids of those that are `gone`."""
    changes = {name: value for name, value in after.items() if name != "peers" and value != before[name]}
    known, there = _by_id(before), _by_id(after)
    peers = [peer for name, peer in there.items() if peer != known.get(name)]
    gone = [name for name in known if name not in there]
    return {**changes, **({"peers": peers} if peers else {}), **({"gone": gone} if gone else {})}


def _by_id(picture: Picture) -> Mapping[str, Picture]:
    return {peer["peer"]: peer for peer in picture["peers"]}


def _event(name: str, data: Picture) -> bytes:
    return event(json.dumps(data, separators=(",", ":")), name=name)
