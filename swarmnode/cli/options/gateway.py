"""Gateway of `serve`, `run --page` and `host`, with its page, at a port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.errors import NetworkDown
from swarmnode.files import write_private
from swarmnode.lending.control_client import GATEWAYS
from swarmnode.net.tasks import until_first
from swarmnode.terminal.console import is_kept, print_json, say
from swarmnode.terminal.formatting import origin

if TYPE_CHECKING:
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.gateway.access.keys import KeyRing
    from swarmnode.gateway.config import GatewayConfig
    from swarmnode.lending.control_server import ControlRequest
    from swarmnode.swarm.storage.swarmfile import Swarm

LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")  # nosec B104  # only compared with
PORT = 8000
PAGE_LINK = "page-link"  # file in the home folder

AddSwarm = Callable[[str, "SwarmClient"], Awaitable[None]]
"""Function that adds a swarm, with its name in the API, to a running gateway."""


@dataclass(frozen=True)
class Served:
    """Addresses of a running gateway: the base `url` for tools and that of the `page`, and the names of its models."""

    url: str
    page: str
    models: list[str]

    def print_json(self) -> None:
        """Print the addresses as an event for scripts."""
        print_json({"event": "serving", "url": self.url, "page": self.page, "models": self.models})

    @property
    def text(self) -> str:
        """The addresses for people."""
        return f"Web page:   {self.page}\nFor tools:  {self.url}  (model {', '.join(self.models) or 'none yet'})"

    def say(self) -> None:
        """Print the addresses for people."""
        say(self.text)


@dataclass(frozen=True)
class GatewayAddress:
    """Address of a gateway; `home` is the folder of the nodes that its page may control, and `say` tells people the addresses."""

    home: Path
    port: int = PORT
    host: str = LOOPBACK
    as_json: bool = False
    say: Callable[[Served], None] = Served.say

    @contextlib.asynccontextmanager
    async def serving(
        self, clients: Mapping[str, SwarmClient], keys: KeyRing | None = None, config: GatewayConfig | None = None
    ) -> AsyncIterator[AddSwarm]:
        """Run a gateway to the swarms in `clients` while the context lasts, print its address, and yield the function that adds a
        swarm to it. Raises LocalError if the port is taken."""
        from swarmnode.gateway.app import build_app
        from swarmnode.gateway.config import GatewayConfig
        from swarmnode.gateway.gateway import Gateway
        from swarmnode.gateway.http.http_server import serving_http
        from swarmnode.gateway.page.page import Page
        from swarmnode.lending.control_server import CommandSocket

        gateway = Gateway(clients, keys, config or GatewayConfig(), home=self.home)
        page = Page(gateway, self.home)
        async with (
            gateway.loading(),
            serving_http(build_app(gateway, page), self.host, self.port) as bound,
            page.watching(),
            contextlib.AsyncExitStack() as sockets,
        ):

            async def answer_owner(name: str, client: SwarmClient) -> None:
                socket = CommandSocket(partial(_obey, name, client))
                await sockets.enter_async_context(socket.listening(self.home / GATEWAYS, name))

            async def add(name: str, client: SwarmClient) -> None:
                gateway.add(name, client)
                page.add(name, client)
                await answer_owner(name, client)
                self._tell_added(name)

            for name, client in clients.items():
                await answer_owner(name, client)
            self._tell(bound, page.owner.token, list(clients))
            yield add

    def _tell(self, port: int, token: str, models: list[str]) -> None:
        url = f"{origin(self.host, port)}/v1"
        page = f"{origin(LOOPBACK if self.host in EVERYWHERE else self.host, port)}/"
        link = f"{page}#owner={token}"
        write_private(self.home / PAGE_LINK, f"{link}\n".encode(), make_folder=True)
        if is_kept(sys.stdout):  # a log has other readers
            say(f"Your own link to the page, with your rights as the owner: cat {self.home / PAGE_LINK}", err=True)
        else:
            page = link
        served = Served(url, page, models)
        served.print_json() if self.as_json else self.say(served)

    def _tell_added(self, model: str) -> None:
        if self.as_json:
            print_json({"event": "added", "model": model})
        else:
            say(f"Serving {model}, too")


def free_gateway_port(port: int) -> int:
    """Return the port if no program listens there at the loopback address, else a free one; tell the user then."""
    from swarmnode.errors import LocalError
    from swarmnode.net.addressing.addresses import check_port_free, free_port

    try:
        check_port_free(f"/ip4/{LOOPBACK}/tcp/{port}")
    except LocalError:
        taken, port = port, free_port()
        say(f"Port {taken} is taken by another program: the page and the API are at port {port}.", err=True)
    return port


async def _obey(name: str, client: SwarmClient, request: ControlRequest) -> dict[str, Any]:
    """Answer a request of the owner through the gateway's socket: `state` or `why`. Raises ValueError for any other command."""
    if request.command not in ("state", "why"):
        raise ValueError(f"a gateway cannot {request.command}")
    answer: dict[str, Any] = {
        "swarm": name,
        "swarm_id": client.swarm.id.hex(),
        "pid": os.getpid(),
        "state": "serving",
        "reason": "",
    }
    answer |= {"sessions": len(client.running), "reroutes": client.reroutes}
    return {**answer, **(client.why(request.about) if request.command == "why" else {})}


async def beside(work: Coroutine[Any, Any, None], swarm: Swarm, address: GatewayAddress) -> None:
    """Run a node's `work` with a gateway to its swarm beside it. The gateway is a client of its own and starts as soon as the swarm
    can be reached. Raises the error that ends either of them."""
    await until_first(work, answer(swarm, address))


async def answer(swarm: Swarm, address: GatewayAddress) -> None:
    """Serve a gateway to the swarm until cancelled; try again as long as the swarm cannot be reached."""
    from swarmnode.client.swarm_client import SwarmClient

    while True:
        with contextlib.suppress(NetworkDown):  # keep trying, as the node does
            async with (
                await SwarmClient.join(swarm, home=address.home) as client,
                address.serving({swarm.name: client}),
            ):
                await asyncio.Event().wait()
