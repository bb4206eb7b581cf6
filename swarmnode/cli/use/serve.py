"""`swarmnode serve`: swarms as models of an HTTP API that OpenAI's clients know."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from swarmnode.cli.options.asking import TRUST, patience_option
from swarmnode.cli.options.gateway import PORT, GatewayAddress
from swarmnode.cli.options.option import argument, option, path_option
from swarmnode.cli.options.sampling import SamplingOptions
from swarmnode.cli.options.swarm import open_swarm
from swarmnode.cli.terminal.console import EVENTS, HOME, LogOptions, command, fail, run_async, say
from swarmnode.cli.terminal.process import CollectorPause

if TYPE_CHECKING:
    from swarmnode.swarm.peers.standing import Trust
    from swarmnode.swarm.storage.swarmfile import Swarm

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class EndpointOptions:
    """Options of the address of a gateway, and of its callers."""

    port: int = option(PORT, "Where to listen; 0 takes a free port.", min=0, max=65535)
    host: str = option("127.0.0.1", "0.0.0.0 is for all: with --keys only.", metavar="ADDRESS")
    keys: Path | None = path_option("Who may ask: a file of hashed keys.")
    new_key: str = option("", "Add a key to the --keys FILE, print it, and serve nothing.", metavar="NAME")
    context: int = option(
        0, "How many tokens a text may have; 0: as many as the model's config says.", metavar="TOKENS", min=0
    )
    cors: list[str] = option(
        [], "Pages that may call from a browser, as https://chat.example. Repeatable.", metavar="ORIGIN"
    )


@command
def serve(
    *,
    swarms: list[str] = argument(
        None,
        "Swarms, each a model: .swarm files, invites or names; default: the one used last.",
        typed=list[str],
        metavar="[SWARM…]",
    ),
    gateway: EndpointOptions,
    sampling: Annotated[SamplingOptions, "compress"],
    trust: Trust = TRUST,
    patience: float = patience_option(30.0, "How long a request waits for peers that have room."),
    home: Path = HOME,
    as_json: bool = EVENTS,
    logs: LogOptions,
) -> None:
    """Answer OpenAI's API for swarms, so that the tools that you have can use them, and show them in a browser. Ctrl-C ends it.

    Example: swarmnode serve friends --port 8000
    """
    logs.begin()
    if gateway.new_key:
        _add_key(gateway.keys, gateway.new_key)
        return
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.codec.tensors import check_compression
    from swarmnode.gateway.access.keys import KeyFile, KeyRing
    from swarmnode.gateway.config import GatewayConfig
    from swarmnode.net.addressing.addresses import check_can_listen

    if gateway.keys is None and gateway.host not in LOOPBACK:
        fail(f"whoever reaches {gateway.host} could use the swarm: give --keys FILE, made by --new-key NAME", 2)
    ring = KeyRing() if gateway.keys is None else KeyFile(gateway.keys)
    check_can_listen("--host", gateway.host, gateway.port)
    config = GatewayConfig(loopback=gateway.host in LOOPBACK, origins=tuple(gateway.cors), compress=sampling.compress)

    async def answer(stop: asyncio.Event) -> None:
        clients = {}
        async with contextlib.AsyncExitStack() as ends:
            pause = ends.enter_context(CollectorPause())
            loaded = [open_swarm(swarm, home) for swarm in swarms or [""]]
            for swarm, name in zip(loaded, _names(loaded), strict=True):
                clients[name] = await ends.enter_async_context(
                    await SwarmClient.join(
                        swarm, home=home, patience_s=patience, trust=trust, most_positions=gateway.context or None
                    )
                )
                check_compression(sampling.compress, clients[name].manifest.codecs)
            pause.end()
            async with GatewayAddress(home, gateway.port, gateway.host, as_json).serving(clients, ring, config):
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
