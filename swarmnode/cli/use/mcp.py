"""`swarmnode mcp`: a swarm as tools of an agent, by the Model Context Protocol over standard input and output."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarmnode.cli.options.asking import TRUST, patience_option
from swarmnode.cli.options.swarm import SWARM, open_swarm
from swarmnode.cli.terminal.console import (
    HOME,
    VERBOSE,
    default_home,
    fail,
    reports_errors,
    run_async,
    set_up_logging,
    unless_stopped,
)


@reports_errors
def mcp(
    swarm: str = SWARM,
    trust: list[str] = TRUST,
    patience: float = patience_option(30.0, "How long a call waits for peers that have room."),
    home: Path = HOME,
    verbose: bool = VERBOSE,
) -> None:
    """Offer a swarm to agents as tools: status, and what its model is for (generate and trace, embed, classify, or infer). They
    start this command themselves, and end it.

    Example: claude mcp add friends -- swarmnode mcp friends
    """
    set_up_logging(verbose)
    try:
        import mcp as _installed  # noqa: F401
    except ImportError:
        fail("this needs the MCP SDK: pip install 'swarmnode[mcp]'", 2)
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.gateway.integrations.swarm_tools import SwarmTools
    from swarmnode.swarm.peers.trust import parse_trust

    async def answer(stop: asyncio.Event) -> None:
        folder = default_home(home)
        loaded = open_swarm(swarm, folder)
        async with await SwarmClient.join(loaded, home=folder, patience_s=patience, trust=parse_trust(trust)) as client:
            await unless_stopped(SwarmTools(client).server(loaded.name).run_stdio_async(), stop)

    run_async(answer)
