"""Command `swarmnode host`: host a swarm for friends with one command.

Mode `host --door-only`: run a peer through which new machines find the swarm.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnode.cli.host.create import NewModelOptions
from swarmnode.cli.lend.lending import attended
from swarmnode.cli.options.founding import (
    BootstrapOptions,
    MembershipOptions,
    NewOwnerOptions,
    OwnerOptions,
    listen_option,
    owner_of,
)
from swarmnode.cli.options.metrics import MetricsOptions
from swarmnode.cli.options.node_file import LendingOptions, with_limits
from swarmnode.cli.options.node_options import NodeOptions, parse_name
from swarmnode.cli.options.swarm import name_swarm, open_swarm
from swarmnode.counting import counted
from swarmnode.gateway.gateway_address import PORT as GATEWAY_PORT
from swarmnode.gateway.gateway_address import GatewayAddress, Served, answer, free_gateway_port
from swarmnode.net.tasks import until_first
from swarmnode.terminal.console import (
    EVENTS,
    HOME,
    LogOptions,
    beginning_anew,
    command,
    fail,
    is_piped,
    print_json,
    run_async,
    say,
)
from swarmnode.terminal.formatting import parse_life
from swarmnode.terminal.option import argument, of_same_names, option
from swarmnode.terminal.progress import Teller, bytes_bar

if TYPE_CHECKING:
    from swarmnode.founding.swarm_creation import NewOwner
    from swarmnode.membership.owner import InviteTerms
    from swarmnode.net.identity import SigningKey
    from swarmnode.node.bootstrap import SwarmHost
    from swarmnode.swarm.records.manifest import Manifest
    from swarmnode.swarm.storage.owner_files import IssuedInvites
    from swarmnode.swarm.storage.swarmfile import Swarm


DOOR = "bootstrap"  # name that others see


def run_bootstrap(
    swarm: str, node: NodeOptions, name: str, doors: BootstrapOptions, metrics: MetricsOptions, *, as_json: bool
) -> None:
    """Run a bootstrap peer of `swarm` until Ctrl-C; it listens at the addresses in `doors`, too. It relays for machines behind NAT
    and hands out weights, but computes nothing. Raises UsageError, LocalError, NetworkDown."""
    from swarmnode.net.addressing.addresses import check_all
    from swarmnode.node.bootstrap import Bootstrap

    host = replace(
        node.host,
        name=parse_name(name, "--name"),
        host_maddrs=check_all("--listen", doors.listen),
        announce_maddrs=check_all("--announce", doors.announce, dialled=True),
    )
    watch = metrics.watch(node.home, as_json=as_json)
    loaded = open_swarm(swarm, node.home)

    async def serve(stop: asyncio.Event) -> None:
        peer = await Bootstrap.start(loaded, host, file=loaded.file)
        invite = None if loaded.private else peer.host.swarm.invite
        try:
            addresses = await peer.host.network.addresses()
            if as_json:
                print_json({"event": "joined", "peer": peer.host.peer_id, "addresses": addresses, "invite": invite})
            else:
                say(f"Bootstrap peer {peer.host.peer_id} of swarm {loaded.name} listens on:")
                for address in addresses:
                    say(f"  {address}")
                hint = f"Invite:\n{invite}" if invite else f"Invites: swarmnode invite {shlex.quote(str(loaded.file))}"
                say(f"{hint}\nPress Ctrl-C to stop.")
            async with watch.over(loaded.name, peer.host.readings):
                await peer.run(stop)
        finally:
            await peer.close()

    run_async(serve)


PORT = 4001
USES = 1
TRY_S = 3.0
_TUNINGS = "instruct|chat|it|hf"


@dataclass(frozen=True)
class NewSwarmOptions(NewModelOptions):
    """Options of a swarm that `host` founds: its model, and its name, empty for one of the model's."""

    name: str = option("", "Name of the swarm; default: the model's, without quantisation.")


@dataclass(frozen=True)
class HostBootstrapOptions(BootstrapOptions):
    """Addresses of the bootstrap peer that `host` starts."""

    listen: list[str] = listen_option(
        f"Address where new machines connect; default: port {PORT} at every address.", "--listen", "--host-maddr"
    )
    announce: list[str] = listen_option(
        "Address at which others reach it, if not --listen's.", "--announce", "--announce-maddr"
    )
    door_only: bool = option(
        False, "Only let machines find the swarm MODEL (its name, file or invite); compute nothing."
    )


@dataclass(frozen=True)
class GuestOptions:
    """Options of the invite for friends, by the names of fields of InviteTerms."""

    uses: int = option(USES, "How many machines an invite admits; 0: any number.")
    life_s: float | None = option(
        "30d",
        "How long an invite and its memberships last: 12h, 7d, 4w or never.",
        "--expires",
        metavar="7d",
        parse=parse_life,
    )


@dataclass(frozen=True)
class PageOptions:
    """Options of the page and the API of a host."""

    port: int = option(
        GATEWAY_PORT, "Port of the page and the API on this machine; if it is taken, a free one.", min=1, max=65535
    )
    no_page: bool = option(False, "Open neither page nor API.")


@command
def host(
    context: typer.Context,
    *,
    source: str = argument(
        "",
        "A folder, GGUF file or hub id (organisation/model:Q4_K_M), or your .swarm file.",
        metavar="MODEL",
        show_default=False,
    ),
    new: Annotated[NewSwarmOptions, "name mode model config module units seed byte_level adapters"],
    membership: MembershipOptions,
    guests: GuestOptions,
    doors: HostBootstrapOptions,
    node: Annotated[
        NodeOptions,
        "memory_bytes max_cache_bytes expert_disk max_upload_bps max_download_bps share hours days only_idle_s exclusive "
        "max_others_load max_memory_pressure on_mains monthly_bytes month_day unmetered max_others_gpu_bytes max_others_gpu_load "
        "rules_file max_celsius max_watts device quantize kv nat_port_map direct lan",
    ],
    page: PageOptions,
    owner: NewOwnerOptions,
    home: Path = HOME,
    as_json: bool = EVENTS,
    metrics: MetricsOptions,
    logs: LogOptions,
) -> None:
    """Share a model with friends. It lends this machine, opens a web page and an API, and prints what a friend types.

    It founds the swarm and lets machines join. Ctrl-C ends all of it. It writes NAME.swarm into this folder, and uses that file the
    next time.

    With --door-only, it relays for machines behind NAT, hands out weights and keeps backups (up to --disk), under the name --name.

    Example: swarmnode host ./llama

    Example: swarmnode host --config ./gpt2-small --mode train --name school

    Example: swarmnode host --door-only friends
    """
    logs.begin()
    if doors.door_only:
        run_bootstrap(source, replace(node, home=home), new.name or DOOR, doors, metrics, as_json=as_json)
        return
    if not (source or new.what):
        fail("which model? Give a folder, a GGUF file, a hub id, or your .swarm file, as in swarmnode host ./llama", 2)
    if source and new.model:
        fail(f"give the model once: {source}, or --model {new.model}", 2)
    new = replace(new, model=source or new.model)
    new.check()
    model = new.what
    tell = Teller(as_json)
    tell("reading", f"Reading {names_of(model)[1]} …", model=model)  # before slow imports
    from swarmnode.membership.owner import InviteTerms
    from swarmnode.net.addressing.addresses import check_all
    from swarmnode.net.identity import check_home, hosting_alone
    from swarmnode.swarm.storage.remembered import machine_name, own_name, store_own_name

    known_here = own_name(home) or (machine_name() if membership.membership == "private" else "")
    node = replace(node, home=home, name=known_here or "host")
    config = node.config()
    terms = of_same_names(InviteTerms, guests)
    announced = check_all("--announce", doors.announce, dialled=True)
    bootstrap_config = replace(config.host, announce_maddrs=announced)
    watch = metrics.watch(home, as_json=as_json)
    founding = Founding(new, membership, doors, owner, quiet=as_json)
    check_home(home)
    swarm, path = founding.find_existing()
    new_owner = None
    if swarm is None:
        _probe(node)  # before anything is written
        swarm, new_owner = founding.create(path)
    welcome = Welcome(path, terms, tell, nat=node.nat_port_map, as_json=as_json)
    key = new_owner.key if new_owner else welcome.key_for(swarm, owner)
    known_as = name_swarm(path, home)
    if known_here and not own_name(home):  # this machine has the same name in the owner's other swarms
        store_own_name(home, known_here)

    async def serve(stop: asyncio.Event) -> None:
        tell("opening", f"Opening the door of {swarm.name}, and starting the node …")
        from swarmnode.node.bootstrap import SwarmHost
        from swarmnode.swarm.records.manifest import TRAIN

        _probe(node)
        trains = swarm.manifest is not None and swarm.manifest.mode == TRAIN
        port = None if page.no_page else free_gateway_port(page.port, home, trains=trains)
        hosting = SwarmHost(swarm, bootstrap_config, config, tell)
        options = LendingOptions(home, hosting.node, context, partial(with_limits, node))
        async with attended(hosting.node, stop, watch, swarm=swarm.name, readings=hosting.readings, options=options):
            await welcome.run(hosting, key, stop, None if port is None else GatewayAddress(home, port), known_as)

    with hosting_alone(home, swarm.id, swarm.name), beginning_anew(), tell:
        run_async(serve)


def _probe(node: NodeOptions) -> None:
    """Raise LocalError if the device of the options is missing."""
    from swarmnode.compute.device import probe_devices

    probe_devices(node.device)


@dataclass(frozen=True)
class Founding:
    """Request for a swarm, either of a checkpoint or in an existing .swarm file."""

    new: NewSwarmOptions
    membership: MembershipOptions
    doors: BootstrapOptions
    owner: NewOwnerOptions
    quiet: bool

    def find_existing(self) -> tuple[Swarm | None, Path]:
        """Return the swarm of this model that an earlier call founded here, None if there is none, and its file. Ends the command
        if the file is missing or does not fit the request, or its GGUF file is missing or cut."""
        from swarmnode.swarm.storage.small_files import is_user_file
        from swarmnode.swarm.storage.swarmfile import SUFFIX, load_swarm, swarm_path

        chosen = self.membership.chosen
        model = self.new.what
        own = not Path(model).expanduser().exists() and is_user_file(swarm_path(model))  # its name, or its path
        is_file = model.endswith(SUFFIX) or own
        names = [self.new.name] if self.new.name else [model] if is_file else list(names_of(model))
        paths = [swarm_path(name) for name in names]
        there = [path for path in paths if is_user_file(path)]
        if not there and is_file:
            fail(f"{model}: no such file; to found a swarm, give a checkpoint", 2)
        swarms = [(load_swarm(path), path) for path in there]
        for swarm, path in swarms:
            if swarm.manifest is None:
                fail(f"{path} is an invite to a swarm: use it with `swarmnode join` or `swarmnode run`", 2)
        same = (each for each in swarms if is_file or self.new.founded(each[0]) or _is_of(each[0], model))
        known = next(same, None) or self._moved(swarms)
        if known is None:
            free = [name for name, path in zip(names, paths, strict=True) if path not in there]
            if not free:
                fail(f"{there[-1]} is a swarm of another model; choose another name with --name", 2)
            from swarmnode.founding.swarm_creation import new_swarm_file  # slow

            return None, new_swarm_file(free[0])
        swarm, path = known
        assert swarm.manifest is not None
        if not is_file and self.new.mode != swarm.manifest.mode:
            fail(
                f"{path} is a swarm that {swarm.manifest.mode}s: add --mode {swarm.manifest.mode}, or choose another --name",
                2,
            )
        if chosen and chosen != _kind_of(swarm).split()[1]:
            fail(f"{path} is {_kind_of(swarm)} swarm and stays one; to found another, choose a name with --name", 2)
        if not self.new.adapters.keys() <= {*swarm.manifest.adapter_names}:
            fail(f"{path} already exists; --adapter is for a new swarm: choose another name with --name", 2)
        self._check_addresses(swarm, path)
        self._check_gguf(swarm, path)
        return swarm, path

    def _moved(self, swarms: Sequence[tuple[Swarm, Path]]) -> tuple[Swarm, Path] | None:
        """Return the first of the swarms, with its file, that is of the model at the place that the user gives, and link it to that
        place; None if all have other models. Raises CheckpointError, LocalError."""
        model = Path(self.new.what).expanduser()
        for swarm, path in swarms:
            from swarmnode.founding.swarm_creation import link_moved  # slow

            with bytes_bar("Checking the weights", quiet=self.quiet) as progress:
                moved = link_moved(swarm, path, model, progress)
            if moved is not None:
                if not self.quiet:
                    say(f"{path} has this model, and serves it from {model} now.")
                return moved, path
        return None

    def _check_gguf(self, swarm: Swarm, path: Path) -> None:
        """End the command if the GGUF file of the swarm's weights is missing, cut or changed. It is read only if it is newer than
        the link to it. If the whole folder of the weights is gone, peers may hold them."""
        from swarmnode.swarm.storage.content import GGUF_SUFFIX, fault_of_content, fault_of_size

        assert swarm.manifest is not None
        folder = swarm.checkpoint
        if folder is None or not folder.is_dir():
            return
        for file in swarm.manifest.files:
            if not file.name.endswith(GGUF_SUFFIX):
                continue
            link = folder / file.name
            fault = fault_of_size(file, folder)
            if fault is None and link.stat().st_mtime_ns > link.lstat().st_mtime_ns:
                with bytes_bar("Checking the weights", quiet=self.quiet) as progress:
                    fault = fault_of_content(file, folder, progress)
            if fault is not None:
                fail(
                    f"{fault}; put it back, give its new place (swarmnode host FILE.gguf --name {_called(path)}), or found "
                    "another swarm with another --name"
                )

    def _check_addresses(self, swarm: Swarm, path: Path) -> None:
        """End the command if the user gave addresses that are not those of the swarm, which its invites name. Raises UsageError if
        an address is invalid."""
        from swarmnode.net.addressing.addresses import check_all, port_of, with_port, without_peer

        kept = set(swarm.bootstrap_listen)
        anywhere = {with_port(address, 0) for address in kept}
        reached = {*map(without_peer, swarm.bootstraps)}
        other = [
            address
            for address in check_all("--listen", self.doors.listen)
            if address not in (anywhere if port_of(address) == 0 else kept)
        ]
        other += [address for address in check_all("--announce", self.doors.announce) if address not in reached]
        if other:
            fail(
                f"{path} has other addresses than {other[0]}, and its invites name them: leave out --listen and --announce, "
                "or found another swarm with --name",
                2,
            )

    def create(self, path: Path) -> tuple[Swarm, NewOwner | None]:
        """Found the swarm; return it and its owner's key, None if it has none. Raises UsageError, CheckpointError, LocalError."""
        from swarmnode.founding.swarm_creation import Bootstraps
        from swarmnode.net.addressing.addresses import port_of

        membership = self.membership.membership
        listen = self.doors.listen or [_free_everywhere()]
        bootstraps = Bootstraps((), listen, self.doors.announce).settled()
        owner = None if membership == "open" else owner_of(path, self.owner)
        swarm, source = self.new.found(path, bootstraps, owner, private=membership == "private", quiet=self.quiet)
        if not self.quiet:
            lines = [f"Note: {remark}." for remark in source.remarks] + ([owner.advice] if owner else [])
            if not self.doors.listen and (port := port_of(listen[0])) != PORT:
                lines.append(f"Port {PORT} is taken here, so new machines connect to this swarm at port {port}.")
            for line in lines:
                say(line)
        return swarm, owner


def _kind_of(swarm: Swarm) -> str:
    """Return the kind of a swarm with its article: "a private", "a public" or "an open"."""
    return "a private" if swarm.private else "a public" if swarm.owner else "an open"


def names_of(model: str) -> tuple[str, str]:
    """Return two names for a swarm of a model, in characters that need no quotes. The first is short: lower case, without
    quantisation, file format and kind of tuning. The second is the whole last part of the path, for a second swarm of the model."""
    from swarmnode.swarm.storage.content import FORMATS, last_part, title_of

    whole, short = last_part(model) or "swarm", title_of(model)
    if any(map(str.isdigit, short)):  # else a folder called my-chat would become "my"
        short = re.sub(rf"(?i)(?:[-._]+(?:{FORMATS}|{_TUNINGS}))+$", "", short)
    return short.strip("-.").lower() or whole, whole


def _is_of(swarm: Swarm, model: str) -> bool:
    assert swarm.manifest is not None
    folder = Path(model).expanduser().absolute()
    repository = model.partition("@")[0]
    return (
        repository == swarm.manifest.model.hub_id
        or model == swarm.original
        or folder in (swarm.checkpoint, Path(swarm.original))
    )


def _free_everywhere() -> str:
    """Return the listen address with the usual port if it is free, so that a router's rule stays valid; else with any free port."""
    from swarmnode.errors import LocalError
    from swarmnode.net.addressing.addresses import check_port_free, free_port

    address = f"/ip4/0.0.0.0/tcp/{PORT}"
    try:
        check_port_free(address)
    except LocalError:
        return f"/ip4/0.0.0.0/tcp/{free_port('0.0.0.0')}"  # nosec B104  # a host is meant for others
    return address


@dataclass(frozen=True)
class Welcome:
    """Text for the host: where new machines connect, how to use the swarm, and what a friend types; by the `terms` of invites."""

    path: Path
    terms: InviteTerms
    tell: Teller
    nat: bool
    as_json: bool = False

    def key_for(self, swarm: Swarm, owner: OwnerOptions) -> SigningKey | None:
        """Return the owner's key if an invite may need it. It is asked for only at a terminal, and only if there is no invite to
        show again. None if it is not at hand; then no invite is made."""
        from swarmnode.membership.owner import shown_invite

        if not swarm.private:
            return None
        key = owner.key_at_hand(self.path)
        has_key = key is not None or not owner.has_key(self.path)
        if has_key or is_piped() or shown_invite(swarm, self.terms, self._book()):
            return key
        return owner.key_of(self.path)

    def invite(self, swarm: Swarm, key: SigningKey | None, used: Callable[[bytes], int]) -> str:
        """Return the line for a friend: of a private swarm the invite that was shown last while it is good, else a new one. It is
        empty if that needs the owner's key."""
        from swarmnode.membership.owner import friends_invite

        return friends_invite(swarm, key, self.terms, self._book(), used) or ""

    def _book(self) -> IssuedInvites:
        from swarmnode.swarm.storage.owner_files import open_issued_invites

        return open_issued_invites(self.path)

    async def run(
        self,
        hosting: SwarmHost,
        key: SigningKey | None,
        stop: asyncio.Event,
        page: GatewayAddress | None,
        served_as: str,
    ) -> None:
        """Host until `stop` is set. Once the door is open, tell its addresses, and serve page and API at `page` (None: neither)
        under the swarm's name `served_as`; then print what the host and a friend type. Raises the error that ends any of it."""
        opened: asyncio.Future[tuple[Swarm, str]] = asyncio.get_running_loop().create_future()

        async def begin(now: Swarm, reached: list[str]) -> None:
            invite = self.invite(now, key, hosting.uses_of)
            await self.tell_addresses(now, invite, reached)
            opened.set_result((now, invite))
            if page is None and not self.as_json:
                self.say(now, invite, None)

        async def open_page(page: GatewayAddress) -> None:
            now, invite = await opened
            await answer(now, replace(page, as_json=self.as_json, say=partial(self.say, now, invite)), served_as)

        await until_first(hosting.run(stop, begin), *([] if page is None else [open_page(page)]))

    async def tell_addresses(self, swarm: Swarm, invite: str, reached: list[str]) -> None:
        """Tell the host where new machines connect, and whether those addresses answer."""
        from swarmnode.net.addressing.addresses import is_loopback, is_public, port_of, without_peer
        from swarmnode.net.addressing.reachability import answers

        tried = dict(zip(reached, await asyncio.gather(*(answers(each, TRY_S) for each in reached)), strict=True))
        lines = [f"Hosting {swarm.name}, {_kind_of(swarm)} swarm. New machines connect here:"]
        lines += [
            f"  {without_peer(address)}{'' if yes else '  (does not answer from here)'}"
            for address, yes in tried.items()
        ]
        port = next(filter(None, map(port_of, reached)), PORT)
        if all(map(is_loopback, reached)):
            lines.append(
                "Only this machine can connect there. To let others in, host the model again: "
                "--name ANOTHER --listen /ip4/0.0.0.0/tcp/4001"
            )
        elif not any(map(is_public, reached)):
            asked = "your router did not open a port when asked" if self.nat else "or try --nat"
            lines.append(
                f"Only your local network can connect there. For the internet, let your router forward port {port} to this "
                f"machine and give --announce /ip4/YOUR.PUBLIC.IP/tcp/{port}; {asked}."
            )
        self.tell("hosting", "\n".join(lines), invite=invite or None, file=str(self.path), addresses=tried)

    def say(self, swarm: Swarm, invite: str, served: Served | None) -> None:
        """Print how the host uses the swarm, at the addresses of the page and the API if they are open, and what a friend types. It
        stands last on the screen, after the node has begun to serve."""
        assert swarm.manifest is not None
        lines = ("", *_ways(swarm.manifest, self.path, served), "", *self._for_a_friend(swarm, invite))
        self.tell.last("welcome", "\n".join(lines))

    def _for_a_friend(self, swarm: Swarm, invite: str) -> list[str]:
        if not invite:
            return [f"Every invite is used up or has expired. A new one: swarmnode invite {_called(self.path)}"]
        life = "for ever" if self.terms.life_s is None else f"for {self.terms.life_s / 86_400:.3g} days"
        uses = counted(self.terms.uses, "machine") if self.terms.uses else "any number of machines"
        whom = f"volunteer, {uses}, {life}" if swarm.private else "anyone with this line, for ever"
        return [f"A friend types the first line and pastes the second ({whom}):", "swarmnode join", invite]


def _called(path: Path) -> str:
    """Return the swarm's name for commands in this folder."""
    return shlex.quote(str(path.with_suffix("")))


def _ways(manifest: Manifest, path: Path, served: Served | None) -> list[str]:
    """Return the lines that tell how to use the swarm: its page, its API, and a command."""
    from swarmnode.swarm.records.manifest import CLASSIFY, EMBED, GENERATE, INFER, TRAIN

    name = _called(path)
    api_paths = {GENERATE: "v1", EMBED: "v1/embeddings", CLASSIFY: "classify"}
    commands = {
        GENERATE: f"swarmnode chat {name}",
        INFER: f"swarmnode infer {name} --input FILE.npz",
        TRAIN: f"swarmnode train {name} --data PATH --steps N",
    }
    task = TRAIN if manifest.mode == TRAIN else manifest.task
    lines = []
    if served is not None:
        lines.append(f"Web page:   {served.page}")
        if task in api_paths:
            lines.append(f"For tools:  {served.url.removesuffix('v1')}{api_paths[task]}  (model {manifest.name})")
    if task in commands:
        lines.append(f"Terminal:   {commands[task]}")
    return lines
