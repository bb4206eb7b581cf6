"""`swarmnode host`: a swarm for friends, with one command."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarmnode.cli.lend.attendance import attended
from swarmnode.cli.options.founding import (
    ADAPTERS,
    ANNOUNCE,
    SUFFIX,
    found,
    new_beside,
    new_owner,
    new_swarm_file,
    parse_adapters,
)
from swarmnode.cli.options.metrics import METRICS_HOST, SERVICE_METRICS_PORT, Watch
from swarmnode.cli.options.node_flags import DEVICE, LAN, MEMORY, NAT, QUANTIZE
from swarmnode.cli.options.owner import OWNER_KEY, PASSWORD_FILE, owner_key_of
from swarmnode.cli.terminal.bars import bytes_bar
from swarmnode.cli.terminal.console import (
    EVENTS,
    HOME,
    LOG_FORMAT,
    VERBOSE,
    default_home,
    fail,
    reports_errors,
    run_async,
    set_up_logging,
)
from swarmnode.cli.terminal.restart import beginning_anew, is_begun_anew
from swarmnode.cli.terminal.teller import Teller
from swarmnode.counting import counted

if TYPE_CHECKING:
    from swarmnode.node.texts import Tell
    from swarmnode.roles.membership.owner import InviteTerms
    from swarmnode.swarm.records.signing_key import SigningKey
    from swarmnode.swarm.storage.swarmfile import Swarm

PORT = 4001
USES = 2  # a node and a client
TRY_S = 3.0


@reports_errors
def host(
    context: typer.Context,
    model: str = typer.Argument(
        ..., metavar="MODEL", help="Checkpoint: a folder, or a hub id; or a .swarm file of yours."
    ),
    name: str = typer.Option("", "--name", help="Name of the swarm; default: the model's.", show_default=False),
    private: bool = typer.Option(False, "--private", help="Only those whom you invite belong to it."),
    uses: int = typer.Option(
        USES, "--uses", help="How many peers may use the invite to a --private swarm; 0: any number."
    ),
    expires: str = typer.Option(
        "30d", "--expires", metavar="7d", help="When memberships by it end: 12h, 7d, 4w, never."
    ),
    listen: list[str] = typer.Option(
        [],
        "--listen",
        metavar="MADDR",
        help=f"Where newcomers knock; default: port {PORT} of every address of this machine.",
    ),
    announce: list[str] = ANNOUNCE,
    adapter: list[str] = ADAPTERS,
    memory: str = MEMORY,
    device: str = DEVICE,
    quantize: str = QUANTIZE,
    nat: bool = NAT,
    lan: bool = LAN,
    owner_key: Path = OWNER_KEY,
    password_file: Path = PASSWORD_FILE,
    home: Path = HOME,
    as_json: bool = EVENTS,
    metrics_port: int = SERVICE_METRICS_PORT,
    metrics_host: str = METRICS_HOST,
    log_format: str = LOG_FORMAT,
    verbose: bool = VERBOSE,
) -> None:
    """Found a swarm for a model, open its door, lend this machine, and print the line that a friend types. Ctrl-C ends all of it.

    It writes NAME.swarm in this folder, and goes on with it the next time.

    Example: swarmnode host ./llama --private
    """
    set_up_logging(verbose, log_format)
    from swarmnode.cli.options.quantities import parse_bytes
    from swarmnode.cli.options.rules import read_rules
    from swarmnode.cli.terminal.durations import parse_duration
    from swarmnode.compute.device import probe_devices
    from swarmnode.config import StageConfig
    from swarmnode.net.addressing.addresses import check_all
    from swarmnode.net.identity_slot import check_home
    from swarmnode.node.node import NodeConfig
    from swarmnode.roles.host import HostConfig
    from swarmnode.roles.membership.owner import InviteTerms

    folder, lent_bytes = default_home(home), parse_bytes(memory, "--memory") if memory else None
    stage = StageConfig(device=device, quantize=quantize, memory_bytes=lent_bytes).check()
    terms = InviteTerms(life_s=None if expires == "never" else parse_duration(expires), uses=uses)
    door = HostConfig(
        folder, "bootstrap", announce_maddrs=check_all("--announce", announce, dialled=True), nat_port_map=nat, lan=lan
    )
    node = NodeConfig(HostConfig(folder, "host", nat_port_map=nat, lan=lan), stage, rules=read_rules(folder))
    watch = Watch(metrics_host, metrics_port, folder, as_json)
    probe_devices(device)
    check_home(folder)
    swarm, path, key = _swarm(context.params)
    tell = Teller(as_json)

    async def welcome(opened: Swarm, reached: list[str]) -> None:
        invite = opened.invite if key is None else _invite(opened, path, terms, key)
        await _welcome(opened, path, invite, reached, terms, tell, nat=nat)

    async def serve(stop: asyncio.Event) -> None:
        from swarmnode.node.swarm_host import SwarmHost

        hosting = SwarmHost(swarm, door, node, tell)
        async with attended(hosting.node, stop, watch, swarm=swarm.name, readings=hosting.readings):
            await hosting.run(stop, welcome)

    with beginning_anew(), tell:
        run_async(serve)


def _swarm(options: Mapping[str, Any]) -> tuple[Swarm, Path, SigningKey | None]:
    """The swarm of this model, founded now unless an earlier call did so here; its file; and of a private one the owner's key."""
    from swarmnode.roles.creation.bootstraps import Bootstraps
    from swarmnode.roles.creation.model_source import from_checkpoint
    from swarmnode.swarm.records.manifest import SERVE

    model, private = options["model"], options["private"]
    given, adapters = (options["owner_key"], options["password_file"]), parse_adapters(options["adapter"])
    swarm, path = _known(model, options["name"], options["listen"], options["announce"])
    if swarm is not None and swarm.manifest is not None and not adapters.keys() <= {*swarm.manifest.adapter_names}:
        fail(f"{path} is founded already; --adapter is for a new swarm: choose another name with --name", 2)
    if swarm is not None:
        return swarm, path, owner_key_of(path, *given) if swarm.private else None
    bootstraps = Bootstraps(listen=options["listen"] or [_free_everywhere()], announce=options["announce"]).settled()
    owner = new_owner(path, *given) if private else None
    quiet = options["as_json"]
    with new_beside(path) as weights:
        with bytes_bar("Dequantising the weights", quiet=quiet) as progress:
            source = from_checkpoint(model, weights, progress=progress)
        swarm = found(path, source, bootstraps, owner, mode=SERVE, private=private, quiet=quiet, adapters=adapters)
    return swarm, path, owner.key if owner else None


def _known(model: str, name: str, listen: list[str], announce: list[str]) -> tuple[Swarm | None, Path]:
    """The swarm of this model that an earlier call founded here, if there is one, and its file."""
    from swarmnode.swarm.storage.swarmfile import load_swarm, swarm_path
    from swarmnode.swarm.storage.user_file import is_user_file

    is_file = model.endswith(SUFFIX)
    path = swarm_path(name or (model if is_file else _name_of(model)))
    if not is_user_file(path):
        if is_file:
            fail(f"{model}: no such file; give a checkpoint to found a swarm", 2)
        return None, new_swarm_file(name or _name_of(model))
    swarm = load_swarm(path)
    if not is_file and not _is_of(swarm, model):
        fail(f"{path} is a swarm of another model; choose another name with --name", 2)
    if (listen or announce) and not is_begun_anew():
        fail(f"{path} says already where newcomers knock; --listen and --announce are for a new swarm", 2)
    return swarm, path


def _name_of(model: str) -> str:
    """A swarm's name out of a model's: its last part, of letters that need no quotes."""
    return (
        re.sub(r"[^\w.-]+", "-", Path(model).expanduser().absolute().name.removesuffix(".gguf")).strip("-.") or "swarm"
    )


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
    """The usual port where it is free, so that a router's rule goes on to hold; else any other."""
    from swarmnode.errors import LocalError
    from swarmnode.net.addressing.addresses import check_port_free, free_port

    address = f"/ip4/0.0.0.0/tcp/{PORT}"
    try:
        check_port_free(address)
    except LocalError:
        return f"/ip4/0.0.0.0/tcp/{free_port('0.0.0.0')}"  # nosec B104  # a host is there for others
    return address


def _invite(swarm: Swarm, path: Path, terms: InviteTerms, key: SigningKey) -> str:
    """A line for a friend, entered into the book."""
    from swarmnode.roles.membership.owner import make_invite
    from swarmnode.swarm.storage.issued_invites import issued_invites_path, open_issued_invites

    book = open_issued_invites(issued_invites_path(path))
    line = make_invite(swarm, key, terms, book)
    book.save()
    return line


async def _welcome(
    swarm: Swarm, path: Path, invite: str, reached: list[str], terms: InviteTerms, tell: Tell, *, nat: bool
) -> None:
    """What the host wants to know once the door is open: where it stands, whether it answers there, and what a friend types."""
    from swarmnode.net.addressing.addresses import is_loopback, is_public
    from swarmnode.net.addressing.probe import answers

    tried = dict(zip(reached, await asyncio.gather(*(answers(each, TRY_S) for each in reached)), strict=True))
    lines = [f"{path.name}: newcomers knock at"]
    lines += [f"  {address}  ({'answers' if yes else 'does not answer from here'})" for address, yes in tried.items()]
    if all(map(is_loopback, reached)):
        lines.append(
            "Only this machine reaches these; for others, found it with a --listen address that they can dial."
        )
    elif not any(map(is_public, reached)):
        more = "the router mapped none (UPnP)" if nat else "or try --nat"
        lines.append(f"Only this network reaches these; for the internet forward a port and give --announce; {more}.")
    life = "for ever" if terms.life_s is None else f"for {terms.life_s / 86_400:.3g} days"
    uses = counted(terms.uses, "peer") if terms.uses else "any number of peers"
    whom = f"volunteer, {uses}, {life}" if swarm.private else "everybody who has the line, for ever"
    ask = f'swarmnode generate {shlex.quote(str(path))} "Once upon a time"'
    lines += [f"A friend types ({whom}):", f"  swarmnode run {invite}", f"You ask it with:\n  {ask}"]
    tell("hosting", "\n".join(lines), invite=invite, file=str(path), addresses=tried)
