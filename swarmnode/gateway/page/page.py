"""State of the page: a feed for each swarm, and the owner's access to this machine's nodes."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import Depends, Request

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.files import write_private
from swarmnode.gateway.access.guard import LOOPBACK_NAMES
from swarmnode.gateway.gateway import Gateway
from swarmnode.gateway.http.api_error import ApiError
from swarmnode.gateway.page.feed import SwarmFeed, SwarmHistory
from swarmnode.lending.control import running_nodes, tell_node
from swarmnode.net.tasks import Tasks
from swarmnode.swarm.storage.small_files import read_user_file

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
                403,
                "only the owner of this machine sees and controls its nodes: open the address that `swarmnode serve` prints",
                code="not_owner",
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
