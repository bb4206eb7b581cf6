"""State of the page: a feed for each swarm, and the owner's access to this machine's nodes.

Feed of one swarm for the page: its state, changes of the state as events, and the history of the last hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from fastapi import Depends, Request

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.files import write_private
from swarmnode.gateway.access.guard import LOOPBACK_NAMES
from swarmnode.gateway.gateway import Gateway
from swarmnode.gateway.http.api_error import ApiError
from swarmnode.gateway.http.event_stream import event
from swarmnode.gateway.page.page_replies import HistoryReply, HistorySample
from swarmnode.lending.control import running_nodes, tell_node
from swarmnode.measuring.meters import ACCEPTED, WASTED, by_proposer
from swarmnode.metrics import table
from swarmnode.metrics.metric import Figures, Histogram
from swarmnode.net.tasks import Tasks
from swarmnode.serving.client.generation import Generation
from swarmnode.swarm.storage.small_files import read_user_file

SWARM_PERIOD_S = 0.5  # changes within one period are sent together
SESSION_PERIOD_S = 0.1
KEEP_ALIVE_S = 15.0  # proxies close silent connections
KEEP_ALIVE = b": nothing new\n\n"
MAX_SESSIONS = 64
HIDDEN = ("addresses",)  # the page does not show where machines are

PERIOD_S = 10.0  # between samples of the history
KEPT = 360  # samples; an hour

Picture = dict[str, Any]

LossOf = Callable[[str], float | None]
"""Function that returns the loss of the last step of the swarm with this id, or None if no node of this machine trains in it. It is
called in a thread."""


class Counts(NamedTuple):
    """Tokens that a client has received, and guesses of its texts that were right and that were in vain."""

    tokens: float
    accepted: float
    wasted: float


class SwarmHistory:
    """History of one swarm: samples of the last hour, taken while `record` runs."""

    def __init__(self, client: SwarmClient, loss_of: LossOf, *, now: Callable[[], float] = time.time) -> None:
        self._client = client
        self._loss_of = loss_of
        self._now = now
        self._samples: deque[HistorySample] = deque(maxlen=KEPT)
        self._counts = self._counted()
        self._speed: float | None = None
        self._waits = self._token_waits()  # at the last sample

    def reply(self) -> HistoryReply:
        """Return all samples."""
        return HistoryReply(period_s=PERIOD_S, samples=list(self._samples))

    async def record(self) -> None:
        """Take a sample every `PERIOD_S` seconds, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            status, (tokens, accepted, wasted), before = self._client.status(), self._counted(), self._counts
            self._samples.append(
                HistorySample(
                    at=self._now(),
                    tokens_per_s=(tokens - before.tokens) / PERIOD_S,
                    accepted_per_s=(accepted - before.accepted) / PERIOD_S,
                    wasted_per_s=(wasted - before.wasted) / PERIOD_S,
                    sessions=len(self._client.running),
                    peers=len(status["peers"]),
                    missing=len(status["missing"]),
                    training_step=status["training_step"],
                    loss=await asyncio.to_thread(self._loss_of, status["swarm"]),
                )
            )
            self._counts = Counts(tokens, accepted, wasted)
            self._speed, self._waits = self.tokens_per_s, self._token_waits()

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of one text in the last period with a text: tokens over the seconds between them. None before the first."""
        (seconds, tokens), (before_s, before) = self._token_waits(), self._waits
        return (
            round((tokens - before) / (seconds - before_s), 1)
            if tokens > before and seconds > before_s
            else self._speed
        )

    def _token_waits(self) -> tuple[float, int]:
        """Return the sum of the waits for tokens after the first one of a text, in seconds, and their number."""
        waits = Figures(self._client.readings()).values(table.TOKEN_SECONDS)
        return next(((each.sum, each.count) for each in waits if isinstance(each, Histogram)), (0.0, 0))

    def _counted(self) -> Counts:
        """Return the number of tokens that this client has received, and of its right and wrong guesses."""
        figures = Figures(self._client.readings())
        right, wrong = (figures.sum(table.CLIENT_DRAFTS, result=result) for result in (ACCEPTED, WASTED))
        return Counts(figures.sum(table.CLIENT_TOKENS), right, wrong)


class SwarmFeed:
    """Feed of the swarm called `name`, which `client` has joined. `tells_sessions` means that every viewer may see the running
    texts."""

    def __init__(self, name: str, client: SwarmClient, history: SwarmHistory, *, tells_sessions: bool) -> None:
        self.client = client
        self.history = history
        self._name = name
        self._tells_sessions = tells_sessions
        self._ended = False
        self._status: tuple[int, Picture] = (-1, {})  # the last status with its revision

    def end(self) -> None:
        """End all event streams of this feed."""
        self._ended = True

    def picture(self) -> Picture:
        """Return the swarm's state in the format of `SwarmReply`. All viewers share one status, because building it for a thousand
        machines takes long."""
        if self._status[0] != self.client.revision:
            status = {name: value for name, value in self.client.status().items() if name not in HIDDEN}
            self._status = (self.client.revision, status)
        return {
            "id": self._name,
            **self._status[1],
            "tokens_per_s": self.history.tokens_per_s,
            "sessions": self._sessions(),
        }

    def _sessions(self) -> list[Picture]:
        running = list(self.client.running.items())[:MAX_SESSIONS] if self._tells_sessions else []
        return [progress_of(trace, result) for trace, result in running]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events: `swarm` with the whole state, then `changes` with the new values, the new and changed peers,
        and the ids of peers that are `gone`."""
        last, revision = self.picture(), self.client.revision
        yield _event("swarm", last)
        silent_s = 0.0
        while not self._ended:
            await asyncio.sleep(SWARM_PERIOD_S)
            silent_s += SWARM_PERIOD_S
            if (self.client.revision, self.history.tokens_per_s, self._sessions()) != (
                revision,
                last["tokens_per_s"],
                last["sessions"],
            ):
                now, revision = self.picture(), self.client.revision
                if changes := changes_between(last, now):
                    yield _event("changes", changes)
                    silent_s = 0.0
                last = now
            if silent_s >= KEEP_ALIVE_S:
                yield KEEP_ALIVE
                silent_s = 0.0

    async def session_events(self, trace: str) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events of one text: `session` after each change, then `over`. Raises ApiError (404) if no running text
        has this trace."""
        result = self.client.running.get(trace)
        if result is None:
            raise ApiError(404, "no text with this trace is being written here: it may have ended")
        last: Picture = {}
        while not self._ended:
            is_over = trace not in self.client.running
            if (now := progress_of(trace, result)) != last:
                yield _event("session", now)
                last = now
            if is_over:
                yield _event("over", {"trace": trace})
                return
            await asyncio.sleep(SESSION_PERIOD_S)


def progress_of(trace: str, result: Generation) -> Picture:
    """Return the state of a text in the format of `SessionReply`."""
    return {
        "trace": trace,
        "route": [{"peer": hop.peer, "span": [hop.start, hop.end]} for hop in result.route],
        "tokens": len(result.ids),
        "tokens_per_s": round(result.tokens_per_s, 3),
        "reroutes": result.reroutes,
        "faults": [{"peer": peer, "cause": cause.lower()} for peer, cause in result.faults],
        "longest_stall_s": round(result.longest_stall_s, 3),
        "drafts": by_proposer(result.drafts),
    }


def changes_between(before: Picture, after: Picture) -> Picture:
    """Return the values of `after` that differ from `before`: of `peers` only the new and changed ones, and as `gone` the ids of
    the missing ones."""
    changes = {name: value for name, value in after.items() if name != "peers" and value != before[name]}
    known, there = _by_id(before), _by_id(after)
    peers = [peer for name, peer in there.items() if peer != known.get(name)]
    gone = [name for name in known if name not in there]
    return {**changes, **({"peers": peers} if peers else {}), **({"gone": gone} if gone else {})}


def _by_id(picture: Picture) -> Mapping[str, Picture]:
    return {peer["peer"]: peer for peer in picture["peers"]}


def _event(name: str, data: Picture) -> bytes:
    return event(json.dumps(data, separators=(",", ":")), name=name)


FILE = "page-token"
HEADER = "X-Swarmnode-Owner"
TOKEN_BYTES = 24
MAX_FILE_BYTES = 1 << 10
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")


class OwnerAccess:
    """Check of the owner's access to the nodes of one home folder. Raises LocalError if its token cannot be written there."""

    def __init__(self, home: Path) -> None:
        self.home = home
        kept = read_user_file(home / FILE, max_bytes=MAX_FILE_BYTES, what="the page's token") or b""
        self.token = kept.decode(errors="replace").strip()
        if len(self.token) < TOKEN_BYTES:
            self.token = secrets.token_urlsafe(TOKEN_BYTES)
            write_private(home / FILE, self.token.encode(), make_folder=True)

    def check(self, request: Request) -> None:
        """Raise ApiError (403) unless the request has the owner's token, comes from this machine, and comes from no other site's
        page."""
        presented = request.headers.get(HEADER, "")
        if not _comes_from_here(request) or not secrets.compare_digest(presented.encode(), self.token.encode()):
            raise ApiError(
                "not_owner",
                "only the owner of this machine sees and controls its nodes: open the address that `swarmnode serve` prints",
            )


def _comes_from_here(request: Request) -> bool:
    """Return whether the request comes directly from this machine. A request through a proxy does not count: a tunnel that ends on
    this machine is not its owner."""
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    peer = request.client.host if request.client is not None else ""
    is_near = False
    with contextlib.suppress(ValueError):
        is_near = ipaddress.ip_address(peer).is_loopback
    return (
        is_near
        and urlsplit(f"//{host}").hostname in LOOPBACK_NAMES
        and (origin is None or urlsplit(origin).netloc == host)
        and not any(name in request.headers for name in FORWARDED)
    )


class Page:
    """Page of a gateway. `home` is the folder of the nodes that the owner may control."""

    def __init__(self, gateway: Gateway, home: Path) -> None:
        self.owner = OwnerAccess(home)
        self.book_lock = asyncio.Lock()  # held while the owner's list of invites is read, changed and written
        self._tells_sessions = not len(gateway.keys)
        self._feeds: dict[str, SwarmFeed] = {}
        self._tasks: Tasks | None = None  # while the page is watching
        for name, model in gateway.swarms.items():
            self.add(name, model.client)

    @property
    def names(self) -> list[str]:
        """Names of the swarms."""
        return list(self._feeds)

    def add(self, name: str, client: SwarmClient) -> None:
        """Show one more swarm."""
        history = SwarmHistory(client, self.loss_of)
        self._feeds[name] = SwarmFeed(name, client, history, tells_sessions=self._tells_sessions)
        if self._tasks is not None:
            self._tasks.spawn(history.record(), f"history of {name}")

    def feed(self, name: str) -> SwarmFeed:
        """Return the feed of the swarm called `name`. Raises ApiError (404) if there is none."""
        if name not in self._feeds:
            raise ApiError(404, f"there is no swarm {name!r} here: choose one of {', '.join(self._feeds)}")
        return self._feeds[name]

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Record the history while the context lasts; end all event streams afterwards."""
        tasks = self._tasks = Tasks("page", on_crash=None)
        for name, feed in self._feeds.items():
            tasks.spawn(feed.history.record(), f"history of {name}")
        try:
            yield
        finally:
            for feed in self._feeds.values():
                feed.end()
            self._tasks = None
            await tasks.close()

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Return the state of each node of this machine, by its name; nodes that do not respond are left out. Blocks while the
        nodes answer, so call it in a thread."""
        answers = {node: tell_node(path, "state") for node, path in running_nodes(self.owner.home).items()}
        return {node: answer for node, answer in answers.items() if answer is not None and "error" not in answer}

    def loss_of(self, swarm: str) -> float | None:
        """Return the loss of the last step that a node of this machine has trained in the swarm with the id `swarm`; None if none
        does. Blocks while the nodes answer."""
        told = (node.get("training") for node in self.nodes().values() if node.get("swarm_id") == swarm)
        return next((training["loss"] for training in told if training is not None), None)


def page_of(request: Request) -> Page:
    """Return the page that received `request`."""
    page = request.app.state.page
    assert isinstance(page, Page)
    return page


def owned_page(request: Request) -> Page:
    """Return the page if the owner sent `request`. Raises ApiError (403) otherwise."""
    page = page_of(request)
    page.owner.check(request)
    return page


OWNED = Depends(owned_page)
