"""Gateway of `serve`, `run --page` and `host`, with its page, at a port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.errors import NetworkDown, SwarmnodeError
from swarmnode.files import write_private
from swarmnode.lending.control import GATEWAYS, running_gateways, tell_node
from swarmnode.net.tasks import Tasks, until_first
from swarmnode.terminal.console import is_recorded, print_json, say, standard_output
from swarmnode.terminal.formatting import origin

if TYPE_CHECKING:
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.gateway.access.keys import KeyRing
    from swarmnode.gateway.gateway import GatewayConfig
    from swarmnode.lending.control import ControlRequest
    from swarmnode.swarm.storage.swarmfile import Swarm

LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")  # nosec B104  # only compared with
PORT = 8000
PAGE_LINK = "page-link"  # file in the home folder
LOOK_S = 2.0  # between looks at a gateway of another process
ADDING_S = 60.0  # for a gateway of another process to reach a swarm

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
        from swarmnode.gateway.gateway import Gateway, GatewayConfig
        from swarmnode.gateway.http.http_server import serving_http
        from swarmnode.gateway.page.page import Page
        from swarmnode.lending.control import CommandSocket

        gateway = Gateway(clients, keys, config or GatewayConfig(), home=self.home)
        page, tasks = Page(gateway, self.home), Tasks("swarms of other processes", on_crash=None)
        url = ""
        async with (
            gateway.loading(),
            serving_http(build_app(gateway, page), self.host, self.port) as bound,
            page.watching(),
            contextlib.AsyncExitStack() as sockets,
        ):
            sockets.push_async_callback(tasks.close)

            async def execute(name: str, client: SwarmClient, request: ControlRequest) -> dict[str, Any]:
                if request.command == "add":
                    tasks.spawn(add_named(request.about), f"add {request.about}")
                # `add` is answered with the state.
                if request.command not in ("state", "why", "add"):
                    raise ValueError(f"a gateway cannot {request.command}")
                answer: dict[str, Any] = {
                    "swarm": name,
                    "swarm_id": client.swarm.id.hex(),
                    "pid": os.getpid(),
                    "state": "serving",
                    "reason": "",
                }
                answer |= {"sessions": len(client.running), "reroutes": client.reroutes}
                return {**answer, **(client.why(request.about) if request.command == "why" else {}), "url": url}

            async def answer_owner(name: str, client: SwarmClient) -> None:
                socket = CommandSocket(partial(execute, name, client))
                await sockets.enter_async_context(socket.listening(self.home / GATEWAYS, name))

            async def add_named(name: str) -> None:
                """Serve a swarm with a name in this home, as another process of this home asks for."""
                from swarmnode.client.swarm_client import SwarmClient
                from swarmnode.swarm.storage.swarmfile import load_named

                try:
                    swarm = None if name in gateway.swarms else load_named(name, self.home)
                    if swarm is not None:
                        await add(
                            name, await sockets.enter_async_context(await SwarmClient.join(swarm, home=self.home))
                        )
                except SwarmnodeError as error:
                    say(f"{name} is not served here: {error}", err=True)

            async def add(name: str, client: SwarmClient) -> None:
                if name in gateway.swarms:
                    return
                gateway.add(name, client)
                page.add(name, client)
                await answer_owner(name, client)
                if self.as_json:
                    print_json({"event": "added", "model": name})
                else:
                    say(f"Serving {name}, too")

            url = f"{origin(self.host, bound)}/v1"
            for name, client in clients.items():
                await answer_owner(name, client)
            self._tell(bound, page.owner.token, list(clients))
            yield add

    def _tell(self, port: int, token: str, models: list[str]) -> None:
        url = f"{origin(self.host, port)}/v1"
        page = f"{origin(LOOPBACK if self.host in EVERYWHERE else self.host, port)}/"
        link = f"{page}#owner={token}"
        write_private(self.home / PAGE_LINK, f"{link}\n".encode(), make_folder=True)
        if is_recorded(standard_output()):  # a log has other readers
            say(f"Your own link to the page, with your rights as the owner: cat {self.home / PAGE_LINK}", err=True)
        else:
            page = link
        self.tell(Served(url, page, models))

    def tell(self, served: Served) -> None:
        """Tell people or scripts the addresses."""
        served.print_json() if self.as_json else self.say(served)


def free_gateway_port(port: int, home: Path, *, trains: bool = False) -> int:
    """Return the port if no program listens there at the loopback address, or a gateway of this home does, which can serve one more
    swarm; else a free one. Tell the user in both cases; the API has no swarm that `trains`."""
    from swarmnode.errors import LocalError
    from swarmnode.net.addressing.addresses import check_port_free, free_port

    try:
        check_port_free(f"/ip4/{LOOPBACK}/tcp/{port}")
    except LocalError:
        if (ours := gateway_at(home, port)) is not None:
            swarms, places = ", ".join(ours.models), "page" if trains else "page and API"
            say(
                f"Your process {ours.pid} serves {swarms} at port {port}: its {places} will have this swarm, too.",
                err=True,
            )
            return port
        taken, port = port, free_port()
        say(f"Port {taken} is taken by another program: the page and the API are at port {port}.", err=True)
    return port


@dataclass(frozen=True)
class OtherGateway:
    """Gateway of another process of this home: its process id, its socket, the base `url`, and the names of its swarms by their
    ids in hex."""

    pid: int
    socket: Path
    url: str
    models: dict[str, str]

    def served(self, home: Path) -> Served:
        """Return its addresses for this home's user, without the owner's token if standard output is kept in a file."""
        link = (home / PAGE_LINK).read_text().strip()
        return Served(self.url, link.partition("#")[0] if is_recorded(standard_output()) else link, list(self.models))


def other_gateways(home: Path) -> list[OtherGateway]:
    """Return the gateways of other processes of this home. Blocks while they answer."""
    found: dict[str, OtherGateway] = {}
    for path in running_gateways(home).values():
        told = tell_node(path, "state") or {}
        url = str(told.get("url", ""))
        if url and told.get("pid") not in (None, os.getpid()):
            gateway = found.setdefault(url, OtherGateway(int(told["pid"]), path, url, {}))
            gateway.models[str(told["swarm"])] = str(told["swarm_id"])
    return list(found.values())


def gateway_at(home: Path, port: int) -> OtherGateway | None:
    """Return the gateway of another process of this home at a port; None if there is none. Blocks while gateways answer."""
    return next((gateway for gateway in other_gateways(home) if gateway.url.endswith(f":{port}/v1")), None)


async def beside(work: Coroutine[Any, Any, None], swarm: Swarm, address: GatewayAddress) -> None:
    """Run a node's `work` with a gateway to its swarm beside it. The gateway is a client of its own and starts as soon as the swarm
    can be reached. Raises the error that ends either of them."""
    await until_first(work, answer(swarm, address))


async def answer(swarm: Swarm, address: GatewayAddress, name: str = "") -> None:
    """Serve a gateway to the swarm until cancelled; try again as long as the swarm cannot be reached.

    If a gateway of another process of this home has the port already, that one serves the swarm by the swarm's `name` in this home,
    until its process ends.
    """
    from swarmnode.client.swarm_client import SwarmClient

    while True:
        if name and (other := await asyncio.to_thread(gateway_at, address.home, address.port)) is not None:
            # That gateway serves the swarm until its process ends. If it has not reached the swarm, it is asked again.
            asked_s, is_told = -ADDING_S, False
            now: OtherGateway | None = other
            while now is not None and now.pid == other.pid:
                if swarm.id.hex() in now.models.values():
                    if not is_told:
                        address.tell(now.served(address.home))
                    is_told = True
                elif time.monotonic() - asked_s > ADDING_S:
                    asked_s = time.monotonic()
                    await asyncio.to_thread(tell_node, other.socket, "add", about=name)
                await asyncio.sleep(LOOK_S)
                now = await asyncio.to_thread(gateway_at, address.home, address.port)
            continue
        with contextlib.suppress(NetworkDown):  # keep trying, as the node does
            async with (
                await SwarmClient.join(swarm, home=address.home) as client,
                address.serving({swarm.name: client}),
            ):
                await asyncio.Event().wait()
