"""The page of a gateway: a feed for each of its swarms, and the owner's access to this machine's nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import Depends, Request

from swarmnode.gateway.gateway import Gateway
from swarmnode.gateway.http.api_error import ApiError
from swarmnode.gateway.page.feed import SwarmFeed
from swarmnode.gateway.page.history import SwarmHistory
from swarmnode.gateway.page.owner_access import OwnerAccess
from swarmnode.lending.control_client import running_nodes, tell_node
from swarmnode.net.tasks import Tasks


class Page:
    """`home` is the folder of the nodes that its owner may command."""

    def __init__(self, gateway: Gateway, home: Path) -> None:
        self.owner = OwnerAccess(home)
        self.book_lock = asyncio.Lock()  # of the book of a swarm's owner, which is read, changed and written
        self._feeds = {
            name: SwarmFeed(
                name, model.client, SwarmHistory(model.client, self.loss_of), tells_sessions=not len(gateway.keys)
            )
            for name, model in gateway.swarms.items()
        }

    def __repr__(self) -> str:
        return f"<Page of {', '.join(self._feeds)}, {self.owner!r}>"

    @property
    def names(self) -> list[str]:
        """Of its swarms."""
        return list(self._feeds)

    def feed(self, name: str) -> SwarmFeed:
        """Of the swarm of this name. Raises ApiError."""
        if name not in self._feeds:
            raise ApiError(404, f"there is no swarm {name!r} here; there is {', '.join(self._feeds)}")
        return self._feeds[name]

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Record what there is to show, and end all streams afterwards."""
        tasks = Tasks("page", on_crash=None)
        for name, feed in self._feeds.items():
            tasks.spawn(feed.history.record(), f"history of {name}")
        try:
            yield
        finally:
            for feed in self._feeds.values():
                feed.end()
            await tasks.close()

    def nodes(self) -> dict[str, dict[str, Any]]:
        """What the nodes of this machine say of themselves, by name. Waits for them: call it in a thread."""
        answers = {node: tell_node(path, "state") for node, path in running_nodes(self.owner.home).items()}
        return {node: answer for node, answer in answers.items() if answer is not None and "error" not in answer}

    def loss_of(self, swarm: str) -> float | None:
        """Of the last step that a node of this machine has trained in the swarm with this id. Waits for the nodes."""
        told = (node.get("training") for node in self.nodes().values() if node.get("swarm_id") == swarm)
        return next((training["loss"] for training in told if training is not None), None)


def page_of(request: Request) -> Page:
    """Whose request it is."""
    page = request.app.state.page
    assert isinstance(page, Page)
    return page


def owned_page(request: Request) -> Page:
    """The page, where its owner asks. Raises ApiError."""
    page = page_of(request)
    page.owner.check(request)
    return page


OWNED = Depends(owned_page)
