"""Commands `swarmnode serve` and `config tool`: serve swarms as models of an HTTP API that OpenAI's clients know, and configure a
tool that is to use it.

Mode `serve --mcp`: offer a swarm to an agent by the Model Context Protocol, over standard input and output.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from swarmnode.cli.options.sampling_options import SamplingOptions
from swarmnode.cli.options.swarm import TRUST, complete_swarms, open_swarm, patience_option
from swarmnode.errors import SwarmnodeError, UsageError
from swarmnode.files import home_folder, parse_json, write_private
from swarmnode.gateway.gateway_address import (
    LOOPBACK,
    PORT,
    AddSwarm,
    GatewayAddress,
    OtherGateway,
    gateway_at,
    other_gateways,
)
from swarmnode.gateway.integrations.configurations import TOOLS, Endpoint
from swarmnode.net.tasks import Tasks, until_first
from swarmnode.swarm.records.manifest import EMBED, GENERATE
from swarmnode.terminal.console import (
    EVENTS,
    HOME,
    CollectorPause,
    LogOptions,
    command,
    fail,
    joined,
    run_async,
    say,
    unless_stopped,
)
from swarmnode.terminal.option import argument, option, path_option
from swarmnode.version import missing_package

if TYPE_CHECKING:
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.swarm.records.announcement import Trust
    from swarmnode.swarm.storage.swarmfile import Swarm


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


FIRST_S = 5.0  # for swarms to answer before the gateway begins without them
LOOK_S = 3.0  # between looks at the names in the home folder
FIRST_PAUSE_S, MOST_PAUSE_S = 5.0, 60.0  # between attempts to join a swarm
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


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
        "Names, .swarm files or invites; default: all that have a name here.",
        typed=list[str],
        metavar="[SWARM…]",
        autocompletion=complete_swarms,
    ),
    gateway: EndpointOptions,
    mcp: bool = option(False, "Instead, offer one swarm to an agent as tools (MCP)."),
    sampling: Annotated[SamplingOptions, "compress drafts"],
    trust: Trust = TRUST,
    patience: float = patience_option(30.0, "How long a request waits for machines with room."),
    home: Path = HOME,
    as_json: bool = EVENTS,
    logs: LogOptions,
) -> None:
    """Open a web page and OpenAI's API for swarms.

    Tools that know OpenAI use the API, your browser shows the page. Without names, it also serves the swarms that you found or
    join while it runs. Ctrl-C stops it.

    With --mcp, an agent speaks with the command over standard input and output, and starts and ends it. The tools are status, and
    what the swarm's model can do: chat, generate and trace, embed, classify, or infer.

    Example: swarmnode serve friends --port 8000

    Example: claude mcp add friends -- swarmnode serve --mcp friends
    """
    logs.begin()
    if mcp:
        if len(swarms or ()) > 1:
            fail("--mcp offers one swarm: name only one", 2)
        offer_tools(swarms[0] if swarms else "", home, patience, trust)
        return
    if gateway.new_key:
        if gateway.keys is None:
            fail("--new-key needs --keys FILE, the file for its hash", 2)
        from swarmnode.gateway.access.keys import new_key

        say(new_key(gateway.keys, gateway.new_key))
        return
    from swarmnode.gateway.access.keys import KeyFile, KeyRing
    from swarmnode.gateway.gateway import GatewayConfig
    from swarmnode.net.addressing.addresses import check_can_listen

    if gateway.keys is None and gateway.host not in LOCAL_HOSTS:
        fail(f"anyone who reaches {gateway.host} could use the swarm: give --keys FILE, made by --new-key NAME", 2)
    ring = KeyRing() if gateway.keys is None else KeyFile(gateway.keys)
    if gateway.host in LOCAL_HOSTS and (ours := gateway_at(home, gateway.port)) is not None:
        _tell_served(ours, _asked(swarms, home), home, as_json)
        return
    check_can_listen("--host", gateway.host, gateway.port)
    config = GatewayConfig(
        loopback=gateway.host in LOCAL_HOSTS,
        origins=tuple(gateway.cors),
        compress=sampling.compress,
        drafts=sampling.drafts,
    )

    how = {"home": home, "patience_s": patience, "trust": trust, "most_positions": gateway.context or None}
    join = partial(_join, sampling.compress, how)

    async def answer(stop: asyncio.Event) -> None:
        async with contextlib.AsyncExitStack() as ends:
            pause = ends.enter_context(CollectorPause())
            asked = _asked(swarms, home)
            joiner = await ends.enter_async_context(SwarmJoiner(asked, join, None if swarms else home))
            clients = await joiner.first()
            pause.end()
            address = GatewayAddress(home, gateway.port, gateway.host, as_json)
            add = await ends.enter_async_context(address.serving(clients, ring, config))
            await until_first(stop.wait(), joiner.go_on(add))

    run_async(answer)


async def _join(compress: str, how: Mapping[str, Any], swarm: Swarm) -> SwarmClient:
    """Join a swarm as `how` says. Raises UsageError if its manifest does not allow the compression, and as `SwarmClient.join`
    does."""
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.codec.tensors import check_compression

    client = await SwarmClient.join(swarm, **how)
    try:
        check_compression(compress, client.manifest.session_codecs)
    except UsageError:
        await client.close()
        raise
    return client


def _tell_served(ours: OtherGateway, asked: Mapping[str, Swarm], home: Path, as_json: bool) -> None:
    """Tell the addresses of another process of this home that serves all swarms in `asked`. Ends the command if one is missing."""
    serves = f"your process {ours.pid} serves {', '.join(ours.models)} at its port already"
    if missing := [name for name, swarm in asked.items() if swarm.id.hex() not in ours.models.values()]:
        fail(f"{serves}, without {', '.join(missing)}: choose another --port", 2)
    served = ours.served(home)
    if as_json:
        served.print_json()
    else:
        say(f"{serves[0].upper()}{serves[1:]}.", err=True)
        served.say()


def _asked(swarms: list[str], home: Path) -> dict[str, Swarm]:
    """Return the swarms to serve, by their names in the API: those in `swarms`; if it is empty, all that have a name here and the
    one used last. Ends the command if there is none. Raises UsageError."""
    from swarmnode.swarm.storage.swarmfile import JoinedSwarms, load_all_named, names_a_swarm

    if swarms:
        loaded = [open_swarm(swarm, home) for swarm in swarms]
        return dict(zip(_names(loaded), loaded, strict=True))
    named, last = load_all_named(home), JoinedSwarms(home).last
    if named and (last is None or last in named or not names_a_swarm(last, home)):
        return named
    used = open_swarm("", home)
    return named if any(swarm.id == used.id for swarm in named.values()) else {**named, used.name: used}


class SwarmJoiner:
    """Client of swarms, each joined by a task of its own that tries again until it succeeds; `first` joins a single one without a
    `home` itself, and only once. With a `home`, swarms that
    get a name there later are joined too; the folder is looked at every `LOOK_S` seconds."""

    def __init__(
        self, swarms: Mapping[str, Swarm], join: Callable[[Swarm], Awaitable[SwarmClient]], home: Path | None
    ) -> None:
        self._swarms = dict(swarms)
        self._join = join
        self._home = home
        self._seen = set(swarms)  # names, also of swarms that are served under another name
        self._ends = contextlib.AsyncExitStack()
        self._joined: asyncio.Queue[tuple[str, SwarmClient]] = asyncio.Queue()
        self._tasks = Tasks("joining", on_crash=None)

    async def __aenter__(self) -> SwarmJoiner:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._tasks.close()
        await self._ends.aclose()

    async def first(self) -> dict[str, SwarmClient]:
        """Join all swarms and return the clients by name, in the order of the names, without swarms that take longer than
        `FIRST_S` seconds. If there is only one swarm, wait for it; raises NetworkDown, NotAdmitted if it cannot be joined."""
        if len(self._swarms) == 1 and self._home is None:
            [(name, swarm)] = self._swarms.items()
            return {name: await self._ends.enter_async_context(await self._join(swarm))}
        tasks = [self._tasks.spawn(self._until_joined(name, swarm), name) for name, swarm in self._swarms.items()]
        await asyncio.wait(tasks, timeout=FIRST_S)
        found = {}
        while not self._joined.empty():
            name, client = self._joined.get_nowait()
            found[name] = client
        return {name: found[name] for name in self._swarms if name in found}

    async def go_on(self, add: AddSwarm) -> None:
        """Add each swarm that is joined from now on. Runs until cancelled."""
        if self._home is not None:
            self._tasks.spawn(self._watch_names(self._home), "look for new names")
        while True:
            await add(*await self._joined.get())

    async def _watch_names(self, home: Path) -> None:
        from swarmnode.swarm.storage.swarmfile import JoinedSwarms, load_named

        joined = JoinedSwarms(home)
        while True:
            await asyncio.sleep(LOOK_S)
            for name in set(joined.names()) - self._seen:
                self._seen.add(name)
                try:
                    swarm = load_named(name, home)
                except UsageError as error:
                    say(f"{name} cannot be served: {error}", err=True)
                    continue
                if swarm is not None and all(other.id != swarm.id for other in self._swarms.values()):
                    self._swarms[name] = swarm
                    self._tasks.spawn(self._until_joined(name, swarm), name)

    async def _until_joined(self, name: str, swarm: Swarm) -> None:
        """Join a swarm and queue its client. After a failure, say why unless it is the same one, and try again later. A swarm that
        trains is left out, unless it was asked for."""
        from swarmnode.swarm.records.manifest import TRAIN

        told, pause_s = "", FIRST_PAUSE_S
        while True:
            try:
                client = await self._join(swarm)
                break
            except SwarmnodeError as error:
                if str(error) != told:
                    say(f"{name} is not served yet: {error}", err=True)
                told = str(error)
            await asyncio.sleep(pause_s)
            pause_s = min(MOST_PAUSE_S, 2 * pause_s)
        await self._ends.enter_async_context(client)
        if self._home is not None and client.manifest.mode == TRAIN:
            say(f"{name} trains its model, so it is not served", err=True)
        else:
            self._joined.put_nowait((name, client))


def _names(swarms: list[Swarm]) -> list[str]:
    """Return the name of each swarm; swarms with the same name also get the beginning of their id."""
    names = [swarm.name for swarm in swarms]
    return [f"{swarm.name}-{swarm.id.hex()[:8]}" if names.count(swarm.name) > 1 else swarm.name for swarm in swarms]


ASK_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 1 << 20
NO_KEY = "none"  # tools want a key even if the gateway needs none


@command
def configure_tool(
    tool: str = argument(..., f"The tool: {', '.join(TOOLS)}.", metavar="TOOL"),
    url: str = option(f"http://{LOOPBACK}:{PORT}/v1", "Address of `swarmnode serve`.", show_default=True),
    model: str = option("", "Use this swarm; default: all that are served."),
    key: str = option(NO_KEY, "API key, if the gateway needs one.", envvar="SWARMNODE_API_KEY", show_default=False),
    write: bool = option(False, "Write the tool's file, unless it already exists."),
) -> None:
    """Set up a tool of yours for `swarmnode serve`.

    It prints the tool's configuration; --write writes it.

    Example: swarmnode config tool aider --write
    """
    if tool not in TOOLS:
        fail(f"{tool} is unknown; choose {', '.join(TOOLS)}, or set {url} in it as an OpenAI-compatible server", 2)
    if not url.startswith(("http://", "https://")):
        fail(f"--url {url}: write it as http://HOST:PORT/v1", 2)
    target, url = TOOLS[tool], url.rstrip("/")
    endpoint = Endpoint(url, [model], key) if model else _endpoint(url, key)
    if not target.can_use(endpoint):
        fail(f"the gateway at {url} serves no model that generates text, which {tool} needs; serve one")
    text = target.configuration(endpoint)
    if not write:
        say(text, nl=False)
        say(f"# Put this into {target.file}; then: {target.then}", err=True)
        return
    path = target.file.expanduser()
    if path.exists():
        fail(f"{path} already exists: add the output of `swarmnode config tool {tool}` to it")
    write_private(path, text.encode(), make_folder=True)  # it may hold a key
    say(f"Wrote {path}. Then: {target.then}")


def _endpoint(url: str, key: str) -> Endpoint:
    """Return the gateway at `url` with the models that it lists. Ends the command if it does not answer."""
    request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as answer:  # nosec B310  # http or https, checked above
            served = [
                (str(one["id"]), one.get("task", GENERATE)) for one in parse_json(answer.read(MAX_ANSWER_BYTES))["data"]
            ]
    except urllib.error.HTTPError as error:
        wants_key = "it needs a key: give --key" if error.code == 401 else f"it answers with status {error.code}"
        fail(f"the gateway at {url} does not list its models: {wants_key}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        elsewhere = other_gateways(home_folder())
        advice = (
            f"yours is at {elsewhere[0].url}: give --url" if elsewhere else "start `swarmnode serve`, or give --model"
        )
        fail(f"no API answers at {url}; {advice}")
    named = {task: [name for name, each in served if each == task] for task in (GENERATE, EMBED)}
    return Endpoint(url, named[GENERATE], key, embedders=named[EMBED])
