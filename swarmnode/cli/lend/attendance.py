"""What a node answers to on its own machine while it runs: `swarmnode pause` and the like, and Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from swarmnode.cli.options.metrics import Watch
from swarmnode.metrics.metric import Source

if TYPE_CHECKING:
    from swarmnode.node.node import Node


@contextlib.asynccontextmanager
async def attended(
    node: Node, stop: asyncio.Event, watch: Watch, *, swarm: str, readings: Source, name: str = ""
) -> AsyncIterator[None]:
    """Its socket in the home folder and its metrics are there while the context lasts. `name` is what `ps` calls it; default: the
    swarm's. Raises LocalError where one of them cannot be."""
    from swarmnode.lending.control_server import ControlServer

    control = ControlServer(node.lending, stop, node.describe, node.why)
    async with watch.over(swarm, readings), control.listening(watch.home, name or swarm):
        yield
