"""Command `swarmnode host`: host a swarm for friends with one command."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from swarmnode.cli.lend.lending import attended
from swarmnode.cli.options.founding import ADAPTERS, DoorOptions, listen_option, owner_of
from swarmnode.cli.options.metrics import MetricsOptions
from swarmnode.cli.options.node_options import NodeOptions
from swarmnode.cli.options.option import argument, of_same_names, option
from swarmnode.cli.options.owner import OwnerOptions
from swarmnode.cli.terminal.console import EVENTS, HOME, LogOptions, command, fail, run_async
from swarmnode.cli.terminal.formatting import parse_life
from swarmnode.cli.terminal.process import beginning_anew, is_begun_anew
from swarmnode.cli.terminal.progress import bytes_bar
from swarmnode.cli.terminal.teller import Teller
from swarmnode.counting import counted

if TYPE_CHECKING:
    from swarmnode.membership.owner import InviteTerms
    from swarmnode.net.identity import SigningKey
    from swarmnode.node.description import Tell
    from swarmnode.swarm.storage.swarmfile import Swarm

PORT = 4001
USES = 2  # a node and a client
TRY_S = 3.0


@dataclass(frozen=True)
class HostDoorOptions(DoorOptions):
    """Addresses of the bootstrap peer that `host` starts."""

    listen: list[str] = listen_option(f"Address where new machines connect; default: port {PORT} at every address.")


@dataclass(frozen=True)
class AdmissionOptions:
    """Options of membership. `uses` and `life_s` are fields of InviteTerms."""

    private: bool = option(False, "Admit only machines that you invite.")
    uses: int = option(USES, "With --private: how many machines can use the invite; 0: any number.")
    life_s: float | None = option(
        "30d", "When memberships by the invite end: 12h, 7d, 4w or never.", "--expires", metavar="7d", parse=parse_life
    )


@command
def host(
    *,
    model: str = argument(..., "Checkpoint (a folder or hub id), or a .swarm file of yours.", metavar="MODEL"),
    name: str = option("", "Name of the swarm; default: the model's."),
    admission: AdmissionOptions,
    doors: HostDoorOptions,
    adapters: dict[str, Path] = ADAPTERS,
    node: Annotated[NodeOptions, "memory_bytes device quantize nat_port_map lan"],
    owner: OwnerOptions,
    home: Path = HOME,
    as_json: bool = EVENTS,
    metrics: MetricsOptions,
    logs: LogOptions,
) -> None:
    """Host a swarm for a model with one command.

    It founds the swarm, lets machines join, lends this machine, and prints the line that a friend types. Ctrl-C ends all of it. It
    writes NAME.swarm into this folder, and uses that file the next time.

    Example: swarmnode host ./llama --private
    """
    logs.begin()
    from swarmnode.compute.device import probe_devices
    from swarmnode.membership.owner import InviteTerms
    from swarmnode.net.addressing.addresses import check_all
    from swarmnode.net.identity import check_home

    config = replace(node, home=home, name="host").config()
    terms = of_same_names(InviteTerms, admission)
    announced = check_all("--announce", doors.announce, dialled=True)
    door = replace(config.host, name="bootstrap", announce_maddrs=announced)
    watch = metrics.watch(home, as_json=as_json)
    probe_devices(node.device)
    check_home(home)
    founding = Founding(model, name, admission.private, doors, adapters, owner, quiet=as_json)
    swarm, path, key = founding.swarm()
    tell = Teller(as_json)

    async def welcome(opened: Swarm, reached: list[str]) -> None:
        invite = opened.invite if key is None else _invite(opened, path, terms, key)
        await _welcome(opened, path, invite, reached, terms, tell, nat=node.nat_port_map)

    async def serve(stop: asyncio.Event) -> None:
        from swarmnode.node.bootstrap import SwarmHost

        hosting = SwarmHost(swarm, door, config, tell)
        async with attended(hosting.node, stop, watch, swarm=swarm.name, readings=hosting.readings):
            await hosting.run(stop, welcome)

    with beginning_anew(), tell:
        run_async(serve)


@dataclass(frozen=True)
class Founding:
    """Request for a swarm, either of a checkpoint or in an existing .swarm file."""

    model: str
    name: str
    private: bool
    doors: DoorOptions
    adapters: Mapping[str, Path]
    owner: OwnerOptions
    quiet: bool

    def swarm(self) -> tuple[Swarm, Path, SigningKey | None]:
        """Return the swarm, which is founded now unless an earlier call did so here; its file; and for a private swarm the owner's
        key, else None. Raises UsageError, CheckpointError, LocalError."""
        swarm, path = self._known()
        if swarm is None:
            return self._founded(path)
        if swarm.manifest is not None and not self.adapters.keys() <= {*swarm.manifest.adapter_names}:
            fail(f"{path} already exists; --adapter is for a new swarm: choose another name with --name", 2)
        return swarm, path, self.owner.key_of(path) if swarm.private else None

    def _known(self) -> tuple[Swarm | None, Path]:
        """Return the swarm of this model that an earlier call founded here, None if there is none, and its file. Ends the command
        if the file is of another model, or is missing."""
        from swarmnode.founding.swarm_creation import SUFFIX, new_swarm_file
        from swarmnode.swarm.storage.swarmfile import load_swarm, swarm_path
        from swarmnode.swarm.storage.user_file import is_user_file

        is_file = self.model.endswith(SUFFIX)
        path = swarm_path(self.name or (self.model if is_file else _name_of(self.model)))
        if not is_user_file(path):
            if is_file:
                fail(f"{self.model}: no such file; to found a swarm, give a checkpoint", 2)
            return None, new_swarm_file(self.name or _name_of(self.model))
        swarm = load_swarm(path)
        if not is_file and not _is_of(swarm, self.model):
            fail(f"{path} is a swarm of another model; choose another name with --name", 2)
        if (self.doors.listen or self.doors.announce) and not is_begun_anew():
            fail(f"{path} already has addresses; --listen and --announce are for a new swarm: leave them out", 2)
        return swarm, path

    def _founded(self, path: Path) -> tuple[Swarm, Path, SigningKey | None]:
        from swarmnode.founding.bootstraps import Bootstraps
        from swarmnode.founding.model_source import from_checkpoint
        from swarmnode.founding.swarm_creation import found, new_beside
        from swarmnode.swarm.records.manifest import SERVE

        bootstraps = Bootstraps((), self.doors.listen or [_free_everywhere()], self.doors.announce).settled()
        owner = owner_of(path, self.owner) if self.private else None
        with new_beside(path) as weights:
            with bytes_bar("Reading the weights", quiet=self.quiet) as progress:
                source = from_checkpoint(self.model, weights, packs=True, progress=progress)
            with bytes_bar("Hashing the weights", quiet=self.quiet) as progress:
                swarm = found(
                    path,
                    source,
                    bootstraps,
                    owner,
                    mode=SERVE,
                    private=self.private,
                    adapters=self.adapters,
                    progress=progress,
                )
        return swarm, path, owner.key if owner else None


def _name_of(model: str) -> str:
    """Return a swarm's name that follows from its model's: the last part of the path, in characters that need no quotes."""
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
    """Return the listen address with the usual port if it is free, so that a router's rule stays valid; else with any free port."""
    from swarmnode.errors import LocalError
    from swarmnode.net.addressing.addresses import check_port_free, free_port

    address = f"/ip4/0.0.0.0/tcp/{PORT}"
    try:
        check_port_free(address)
    except LocalError:
        return f"/ip4/0.0.0.0/tcp/{free_port('0.0.0.0')}"  # nosec B104  # a host is meant for others
    return address


def _invite(swarm: Swarm, path: Path, terms: InviteTerms, key: SigningKey) -> str:
    """Return an invite for a friend, and enter it into the owner's list."""
    from swarmnode.membership.owner import issue_invite
    from swarmnode.swarm.storage.issued_invites import issued_invites_path, open_issued_invites

    line, _ = issue_invite(swarm, key, terms, open_issued_invites(issued_invites_path(path)))
    return line


async def _welcome(
    swarm: Swarm, path: Path, invite: str, reached: list[str], terms: InviteTerms, tell: Tell, *, nat: bool
) -> None:
    """Tell the host where new machines connect, whether those addresses answer, and what a friend types."""
    from swarmnode.net.addressing.addresses import is_loopback, is_public
    from swarmnode.net.addressing.probe import answers

    tried = dict(zip(reached, await asyncio.gather(*(answers(each, TRY_S) for each in reached)), strict=True))
    lines = [f"New machines connect to {path.name} at"]
    lines += [f"  {address}  ({'answers' if yes else 'does not answer from here'})" for address, yes in tried.items()]
    if all(map(is_loopback, reached)):
        lines.append("Only this machine reaches these. To let others in, create the swarm with --listen ADDRESS.")
    elif not any(map(is_public, reached)):
        more = "the router opened none (UPnP)" if nat else "or try --nat"
        lines.append(f"Only this network reaches these. For the internet, forward a port and give --announce; {more}.")
    life = "for ever" if terms.life_s is None else f"for {terms.life_s / 86_400:.3g} days"
    uses = counted(terms.uses, "machine") if terms.uses else "any number of machines"
    whom = f"volunteer, {uses}, {life}" if swarm.private else "anyone with this line, for ever"
    ask = f'swarmnode generate {shlex.quote(str(path))} "Once upon a time"'
    lines += [f"A friend types ({whom}):", f"  swarmnode run {invite}", f"You use it with:\n  {ask}"]
    tell("hosting", "\n".join(lines), invite=invite, file=str(path), addresses=tried)
