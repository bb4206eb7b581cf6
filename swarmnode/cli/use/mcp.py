"""Command `swarmnode mcp`: offer a swarm to an agent by the Model Context Protocol, over standard input and output."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.cli.options.asking import TRUST, patience_option
from swarmnode.cli.options.swarm import SWARM, open_swarm
from swarmnode.terminal.console import HOME, Verbosity, command, fail, joined, run_async, unless_stopped
from swarmnode.version import missing_package

if TYPE_CHECKING:
    from swarmnode.swarm.peers.standing import Trust


@command
def mcp(
    *,
    swarm: str = SWARM,
    trust: Trust = TRUST,
    patience: float = patience_option(30.0, "How long a call waits for machines with room."),
    home: Path = HOME,
    logs: Verbosity,
) -> None:
    """Offer a swarm to an agent as tools (MCP).

    The tools are status, and what the swarm's model can do: chat, generate and trace, embed, classify, or infer. The agent
    starts and ends this command.

    Example: claude mcp add friends -- swarmnode mcp friends
    """
    logs.begin()
    try:
        import mcp as _installed  # noqa: F401
    except ImportError:
        fail(f"this needs the MCP SDK, and {missing_package('mcp')}", 2)
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.gateway.integrations.swarm_tools import SwarmTools

    async def answer(stop: asyncio.Event) -> None:
        loaded = open_swarm(swarm, home)
        joining = SwarmClient.join(loaded, home=home, patience_s=patience, trust=trust)
        async with await joined(joining, stop) as client:
            await unless_stopped(SwarmTools(client).server(loaded.name).run_stdio_async(), stop)

    run_async(answer)
