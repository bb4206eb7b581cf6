"""Command `swarmnode serve`: serve swarms as models of an HTTP API that OpenAI's clients know."""

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
    """Options of a gateway's address and of the clients that it admits."""

    port: int = option(PORT, "Listen at this port; 0 picks a free one.", min=0, max=65535)
    host: str = option("127.0.0.1", "Listen at this address; 0.0.0.0 is for all, and needs --keys.", metavar="ADDRESS")
    keys: Path | None = path_option("Admit only clients with a key in this file of hashed keys.")
    new_key: str = option("", "Add a key to the --keys FILE, print it, and exit.", metavar="NAME")
    context: int = option(0, "Most tokens of a text; 0: as the model's config says.", metavar="TOKENS", min=0)
    cors: list[str] = option(
        [], "Let pages of this site call from a browser, as https://chat.example. Repeatable.", metavar="ORIGIN"
    )


@command
def serve(
    *,
    swarms: list[str] = argument(
        None,
        "Swarms to serve, each as a model: .swarm files, invites or names; default: the one you used last.",
        typed=list[str],
        metavar="[SWARM…]",
    ),
    gateway: EndpointOptions,
    sampling: Annotated[SamplingOptions, "compress"],
    trust: Trust = TRUST,
    patience: float = patience_option(30.0, "How long a request waits for machines with room."),
    home: Path = HOME,
    as_json: bool = EVENTS,
    logs: LogOptions,
) -> None:
    """Serve swarms by OpenAI's API and as a page.

    Tools that know OpenAI use the API, your browser shows the page. Ctrl-C stops it.

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
        fail(f"anyone who reaches {gateway.host} could use the swarm: give --keys FILE, made by --new-key NAME", 2)
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
        fail("--new-key needs --keys FILE, the file for its hash", 2)
    say(new_key(keys, name))


def _names(swarms: list[Swarm]) -> list[str]:
    """Return the name of each swarm; swarms with the same name also get the beginning of their id."""
    names = [swarm.name for swarm in swarms]
    return [f"{swarm.name}-{swarm.id.hex()[:8]}" if names.count(swarm.name) > 1 else swarm.name for swarm in swarms]
