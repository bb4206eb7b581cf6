"""`swarmnode service install`, `status`, `logs` and `uninstall`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import typer

from swarmnode.cli.terminal.console import HOME, default_home, fail, reports_errors, say

UNIT = "swarmnode@.service"
PROGRAM = "%h/.local/bin/swarmnode"  # what the unit has; the one that installs it takes its place
TIMEOUT_S = 60.0

NAME = typer.Argument(..., metavar="NAME", help="Name of the swarm that was joined; one service for each.")
app = typer.Typer(
    help="Run a node in the background, from the start of the machine on (systemd).", no_args_is_help=True
)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@reports_errors
def install(
    context: typer.Context,
    name: str = NAME,
    home: Path = HOME,
    start: bool = typer.Option(True, "--start/--no-start", help="Start it now, and whenever you log in."),
) -> None:
    """Install and start a node for a swarm that was joined. Further options are those of `swarmnode run`.

    Example: swarmnode service install friends --memory 6GB --only-idle 10m
    """
    from swarmnode.cli.options.swarm import open_swarm
    from swarmnode.swarm.storage.atomic import write_private

    _check_name(name)
    options = [*context.args, *(["--home", str(default_home(home))] if home is not None else [])]
    _check_options(options)
    swarm = open_swarm(name, default_home(home))
    folder, units = _folder("swarmnode"), _folder("systemd/user")
    for each in (folder, units):
        each.mkdir(parents=True, exist_ok=True)
    (units / UNIT).write_text(unit_text(_program()))
    link = folder / f"{name}.swarm"
    if swarm.file is not None:
        link.unlink(missing_ok=True)
        link.symlink_to(swarm.file.absolute())
    else:
        write_private(link, f"{_invite(name, default_home(home))}\n".encode())
    write_private(folder / f"{name}.conf", f"OPTIONS={shlex.join(options)}\n".encode())
    say(f"Wrote {units / UNIT}, {link} and {folder / f'{name}.conf'}")
    if start:
        _systemctl("daemon-reload")
        _systemctl("enable", "--now", f"swarmnode@{name}")
        say(
            f"It runs. To have it run while you are not logged in, too: loginctl enable-linger\nswarmnode service logs {name}"
        )


@app.command()
@reports_errors
def status(name: str = NAME) -> None:
    """Whether the service runs, as systemd has it.

    Example: swarmnode service status friends
    """
    _check_name(name)
    raise typer.Exit(_call("systemctl", "--user", "status", "--no-pager", f"swarmnode@{name}"))


@app.command()
@reports_errors
def logs(name: str = NAME, follow: bool = typer.Option(False, "--follow", "-f", help="Go on with what comes.")) -> None:
    """What the service has said.

    Example: swarmnode service logs friends -f
    """
    _check_name(name)
    arguments = ["--follow"] if follow else ["--no-pager", "--lines=100"]
    raise typer.Exit(_call("journalctl", "--user", f"--unit=swarmnode@{name}", *arguments, endless=follow))


@app.command()
@reports_errors
def uninstall(name: str = NAME) -> None:
    """Stop the service and remove what `install` wrote. Weights, identity and the joined swarm stay.

    Example: swarmnode service uninstall friends
    """
    _check_name(name)
    folder = _folder("swarmnode")
    written = [folder / f"{name}.swarm", folder / f"{name}.conf"]
    if not any(path.is_symlink() or path.exists() for path in written):
        fail(f"there is no service {name}", 2)
    _systemctl("disable", "--now", f"swarmnode@{name}")
    for path in written:
        path.unlink(missing_ok=True)
    if not list(folder.glob("*.conf")):
        (_folder("systemd/user") / UNIT).unlink(missing_ok=True)
        _systemctl("daemon-reload")
    say(f"The service {name} is gone.")


def unit_text(program: str) -> str:
    """The unit of this package, with the program that it starts."""
    text = resources.files("swarmnode.cli.lend.service").joinpath(UNIT).read_text()
    return text.replace(PROGRAM, program)


def _program() -> str:
    """How this swarmnode is started, in a unit's words."""
    found = shutil.which("swarmnode")
    return found if found is not None else f"{sys.executable} -m swarmnode.cli.main"


def _folder(kind: str) -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / kind


def _invite(name: str, home: Path) -> str:
    from swarmnode.swarm.storage.joined_swarms import JoinedSwarms

    return JoinedSwarms(home).invite_to(name) or fail(f"{name} was not joined here: `swarmnode join` first", 2)


def _check_name(name: str) -> None:
    """What systemd takes for the name of an instance without quoting."""
    if not re.fullmatch(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*", name):
        fail(
            f"{name!r} cannot be a service's name; join the swarm under another one: swarmnode join INVITE --name friends",
            2,
        )


def _check_options(options: list[str]) -> None:
    """They must be ones that `swarmnode run` takes: the service would fail where nobody looks."""
    from swarmnode.cli.main import app as commands

    run = typer.main.get_command(commands).commands["run"]  # type: ignore[attr-defined]  # it is a group
    run.make_context("swarmnode run", ["name", *options])


def _systemctl(*arguments: str) -> None:
    if _call("systemctl", "--user", *arguments):
        fail(f"systemctl --user {shlex.join(arguments)} did not succeed")


def _call(program: str, *arguments: str, endless: bool = False) -> int:
    if shutil.which(program) is None:
        fail(f"no {program} on this machine: services need systemd")
    return subprocess.run([program, *arguments], timeout=None if endless else TIMEOUT_S, check=False).returncode
