"""Commands `swarmnode service install`, `status`, `logs` and `uninstall`."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shlex
from pathlib import Path
from typing import Any

import typer

from swarmnode.cli.lend.service.managers import Launchd, ScheduledTask, Systemd
from swarmnode.cli.lend.service.service import Service, ServiceManager, config_folder
from swarmnode.cli.options.swarm import complete_swarms
from swarmnode.terminal.console import HOME, command, fail, say
from swarmnode.terminal.option import argument, option

WSL = "WSL_DISTRO_NAME"  # set by WSL
SYSTEMD = Path("/run/systemd/system")  # exists if systemd runs the machine

NAME = argument(
    ...,
    "Name of a swarm that you joined; each has its own service.",
    metavar="NAME",
    autocompletion=complete_swarms,
)


@command
def install(
    context: typer.Context,
    *,
    name: str = NAME,
    home: Path = HOME,
    start: bool = option(True, "Start the service now and whenever you log in.", "--start/--no-start"),
) -> None:
    """Start a node in the background.

    Add any options of `swarmnode run`.

    Example: swarmnode service install friends --memory 6GB --only-idle 10m
    """
    from swarmnode.cli.options.swarm import open_swarm
    from swarmnode.files import write_private
    from swarmnode.swarm.storage.swarmfile import JoinedSwarms, find_name

    name = find_name(name, JoinedSwarms(home).all_names()) or name
    _check_name(name)
    if not all(word.isprintable() for word in (*context.args, str(home))):
        fail("an option has a control character, which service managers cannot keep: leave it out", 2)
    service = Service(name, tuple(context.args), None if context.params["home"] is None else home)
    service = dataclasses.replace(service, node=_parsed(service.all_options)["name"])
    swarm = open_swarm(name, home)
    manager = manager_here()
    service.swarm.parent.mkdir(parents=True, exist_ok=True)
    if swarm.file is not None:
        service.swarm.unlink(missing_ok=True)
        service.swarm.symlink_to(swarm.file.absolute())
    else:
        write_private(service.swarm, f"{_invite(name, home)}\n".encode())
    written = [service.swarm, *manager.write(service)]
    say(f"Wrote {', '.join(map(str, written))}")
    if start:
        say(f"The service runs. {manager.start(service)}\nRead its log: swarmnode service logs {name}")
    else:
        steps = "\n".join(f"  {shlex.join(words)}" for words in manager.start_commands(service))
        say(f"It does not run yet. Start it now and whenever you log in:\n{steps}")


@command
def status(name: str = NAME) -> None:
    """Show whether the service runs. The exit code is the service manager's.

    Example: swarmnode service status friends
    """
    raise typer.Exit(manager_here().status(_installed(name)))


@command
def logs(
    name: str = argument("", "Name of a service; default: the only one.", metavar="[NAME]"),
    follow: bool = option(False, "Keep printing new lines.", "--follow", "-f"),
) -> None:
    """Show a service's log, or where other logs are. The exit code is that of the program that prints it.

    Example: swarmnode service logs friends -f
    """
    services = _services()
    if not name and len(services) > 1:
        fail(f"which one? There are services for {', '.join(services)}", 2)
    if not name and not services:
        say(
            "No service is installed here. A node that you start prints its log in its own terminal, all of it with --verbose. "
            "`swarmnode ps` lists the running nodes, `swarmnode why` their decisions."
        )
        return
    raise typer.Exit(manager_here().logs(_installed(name or services[0]), follow=follow))


@command
def uninstall(name: str = NAME) -> None:
    """Stop the service and remove its files. Weights, identity and the joined swarm stay.

    Example: swarmnode service uninstall friends
    """
    name = _installed(name)
    manager_here().remove(name)
    Service(name).swarm.unlink(missing_ok=True)
    say(f"Removed the service {name}.")


def manager_here() -> ServiceManager:
    """Return the service manager of this machine."""
    if platform.system() == "Darwin":
        return Launchd()
    if os.environ.get(WSL) and not SYSTEMD.is_dir():
        return ScheduledTask()
    return Systemd()


def _invite(name: str, home: Path) -> str:
    from swarmnode.swarm.storage.swarmfile import JoinedSwarms

    return JoinedSwarms(home).invite_to(name) or fail(f"you have not joined {name} here: run `swarmnode join` first", 2)


def _services() -> list[str]:
    """Return the names of the installed services, sorted."""
    return [path.stem for path in sorted(config_folder("swarmnode").glob("*.swarm"))]


def _installed(name: str) -> str:
    """Return the name of the installed service that `name` is, or begins. Ends the command if there is no such service."""
    from swarmnode.swarm.storage.swarmfile import find_name, name_advice

    _check_name(name)
    services = _services()
    return find_name(name, services) or fail(
        f"there is no service {name}; {name_advice(name, services, none=f'`swarmnode service install {name}` creates it')}",
        2,
    )


def _check_name(name: str) -> None:
    """End the command if a service manager would need quotes around `name`."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
        fail(
            f"{name!r} cannot be a service's name; join the swarm under another name: swarmnode join --as friends",
            2,
        )


def _parsed(options: list[str]) -> dict[str, Any]:
    """Return the values of options of `swarmnode run`. Ends the command if an option is wrong: else the service would fail
    unseen."""
    from swarmnode.cli.main import app as commands

    run = typer.main.get_command(commands).commands["run"]  # type: ignore[attr-defined]  # it is a group
    return dict(run.make_context("swarmnode run", ["name", *options]).params)
