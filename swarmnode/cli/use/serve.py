"""`swarmnode serve`: swarms as models of an HTTP API that OpenAI's clients know."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarmnode.cli.options.asking import TRUST, patience_option
from swarmnode.cli.options.gateway import PORT, GatewayAddress
from swarmnode.cli.options.sampling import COMPRESS
from swarmnode.cli.options.swarm import open_swarm
from swarmnode.cli.terminal.collector import CollectorPause
from swarmnode.cli.terminal.console import (
    EVENTS,
    HOME,
    LOG_FORMAT,
    VERBOSE,
    default_home,
    fail,
    reports_errors,
    run_async,
    say,
    set_up_logging,
)

if TYPE_CHECKING:
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.swarm.storage.swarmfile import Swarm

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@reports_errors
def serve(
    swarms: list[str] = typer.Argument(
        None,
        metavar="[SWARM…]",
        help="Swarms, each a model: .swarm files, invites or names; default: the one used last.",
    ),
    port: int = typer.Option(PORT, "--port", min=0, max=65535, help="Where to listen; 0 takes a free port."),
    host: str = typer.Option("127.0.0.1", "--host", metavar="ADDRESS", help="0.0.0.0 is for all: with --keys only."),
    keys: Path = typer.Option(None, "--keys", metavar="FILE", help="Who may ask: a file of hashed keys."),
    new_key: str = typer.Option(
        "", "--new-key", metavar="NAME", help="Add a key to the --keys FILE, print it, and serve nothing."
    ),
    cors: list[str] = typer.Option(
        [], "--cors", metavar="ORIGIN", help="Pages that may call from a browser, as https://chat.example. Repeatable."
    ),
    compress: str = COMPRESS,
    trust: list[str] = TRUST,
    patience: float = patience_option(30.0, "How long a request waits for peers that have room."),
    home: Path = HOME,
    as_json: bool = EVENTS,
    log_format: str = LOG_FORMAT,
    verbose: bool = VERBOSE,
) -> None:
    """Answer OpenAI's API for swarms, so that the tools that you have can use them, and show them in a browser. Ctrl-C ends it.

    Example: swarmnode serve friends --port 8000
    """
    set_up_logging(verbose, log_format)
    if new_key:
        _add_key(keys, new_key)
        return
    from swarmnode.gateway.access.keys import KeyFile, KeyRing
    from swarmnode.gateway.config import GatewayConfig
    from swarmnode.net.addressing.addresses import check_can_listen
    from swarmnode.roles.serving.client.compressions import check_compression

    if keys is None and host not in LOOPBACK:
        fail(f"whoever reaches {host} could use the swarm: give --keys FILE, made by --new-key NAME", 2)
    ring = KeyRing() if keys is None else KeyFile(keys)
    check_can_listen("--host", host, port)
    config = GatewayConfig(loopback=host in LOOPBACK, origins=tuple(cors), compress=compress)
    folder = default_home(home)

    async def answer(stop: asyncio.Event) -> None:
        clients = {}
        async with contextlib.AsyncExitStack() as ends:
            pause = ends.enter_context(CollectorPause())
            loaded = [open_swarm(swarm, folder) for swarm in swarms or [""]]
            for swarm, name in zip(loaded, _names(loaded), strict=True):
                clients[name] = await ends.enter_async_context(await _join(swarm, folder, patience, trust))
                check_compression(compress, clients[name].manifest.codecs)
            pause.end()
            async with GatewayAddress(folder, port, host, as_json).serving(clients, ring, config):
                await stop.wait()

    run_async(answer)


def _add_key(keys: Path | None, name: str) -> None:
    from swarmnode.gateway.access.keys import new_key

    if keys is None:
        fail("--new-key needs --keys FILE, where its hash is kept", 2)
    say(new_key(keys, name))


def _names(swarms: list[Swarm]) -> list[str]:
    """What each is called; swarms of one name by the beginnings of their ids, too."""
    names = [swarm.name for swarm in swarms]
    return [f"{swarm.name}-{swarm.id.hex()[:8]}" if names.count(swarm.name) > 1 else swarm.name for swarm in swarms]


async def _join(swarm: Swarm, home: Path, patience_s: float, trust: list[str]) -> SwarmClient:
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.swarm.peers.trust import parse_trust

    return await SwarmClient.join(swarm, home=home, patience_s=patience_s, trust=parse_trust(trust))
