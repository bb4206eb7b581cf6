"""Mode `serve --mcp`: offer a swarm to an agent by the Model Context Protocol, over standard input and output."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.cli.options.swarm import open_swarm
from swarmnode.terminal.console import fail, joined, run_async, unless_stopped
from swarmnode.version import missing_package

if TYPE_CHECKING:
    from swarmnode.swarm.peers.standing import Trust


def offer_tools(swarm: str, home: Path, patience_s: float, trust: Trust) -> None:
    """Answer an agent on standard input and output until it ends. Ends the command if the MCP SDK is missing. Raises UsageError,
    NetworkDown, NotAdmitted, Interrupted."""
    try:
        import mcp as _installed  # noqa: F401
    except ImportError:
        fail(f"this needs the MCP SDK, and {missing_package('mcp')}", 2)
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.gateway.integrations.swarm_tools import SwarmTools

    async def answer(stop: asyncio.Event) -> None:
        loaded = open_swarm(swarm, home)
        joining = SwarmClient.join(loaded, home=home, patience_s=patience_s, trust=trust)
        async with await joined(joining, stop) as client:
            await unless_stopped(SwarmTools(client).server(loaded.name).run_stdio_async(), stop)

    run_async(answer)
