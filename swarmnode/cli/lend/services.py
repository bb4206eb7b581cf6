"""Commands `swarmnode service`: a node in the background, under systemd or launchd."""

from __future__ import annotations

import dataclasses
import os
import platform
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import typer

from swarmnode.cli.options.swarm import complete_swarms
from swarmnode.terminal.console import HOME, command, fail, say
from swarmnode.terminal.option import argument, option

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Service:
    """Service of a node. `name` is that of a joined swarm, `options` are those of `swarmnode run` except `home`, which is None for
    the default folder. `node` is the node's own name, empty if it has none."""

    name: str
    options: tuple[str, ...] = ()
    home: Path | None = None
    node: str = ""

    @property
    def swarm(self) -> Path:
        """Path of the file with the invite, or of the link to the founder's .swarm file."""
        return config_folder("swarmnode") / f"{self.name}.swarm"

    @property
    def all_options(self) -> list[str]:
        """All options of `swarmnode run`, including --home."""
        return [*self.options, *self._home]

    @property
    def command(self) -> list[str]:
        """Command that runs the node."""
        return [*program(), "run", str(self.swarm), "--json", *self.all_options]

    @property
    def stop_command(self) -> list[str]:
        """Command that lets the node leave its swarm in order."""
        return [*program(), "stop", self.node or self.name, *self._home]

    @property
    def _home(self) -> list[str]:
        return [] if self.home is None else ["--home", str(self.home)]


class ServiceManager(Protocol):
    """Service manager of an operating system: starts services and keeps them running."""

    def write(self, service: Service) -> list[Path]:
        """Write the files that the manager needs, except the swarm's file.

        Args:
            service: The service to install.

        Returns:
            The paths of the written files.
        """
        ...

    def start(self, service: Service) -> str:
        """Start the service now and whenever the user logs in.

        Returns:
            A sentence for the user, about the log or about running while logged out.
        """
        ...

    def start_commands(self, service: Service) -> list[list[str]]:
        """Return the commands that start a written service, each as its words."""
        ...

    def status(self, name: str) -> int:
        """Print the state of the service called `name`.

        Returns:
            The exit code of the system's program.
        """
        ...

    def logs(self, name: str, *, follow: bool) -> int:
        """Print the log of the service called `name`.

        Args:
            name: The service's name.
            follow: Whether to keep printing new lines.

        Returns:
            The exit code of the system's program.
        """
        ...

    def remove(self, name: str) -> None:
        """Stop the service called `name`, and remove its files that no other service uses, even if the manager does not answer."""
        ...


def program() -> list[str]:
    """Return the command that starts this swarmnode."""
    found = shutil.which("swarmnode")
    return [found] if found is not None else [sys.executable, "-m", "swarmnode.cli.main"]


def config_folder(kind: str) -> Path:
    """Return the folder `kind` in the user's folder of configuration (XDG_CONFIG_HOME, or ~/.config)."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / kind


def call(command: str, *arguments: str, endless: bool = False) -> int:
    """Run a program of the system until it ends and return its exit code. `endless` turns the time limit off. Ends the command if
    the program is missing."""
    code = try_call(command, *arguments, endless=endless)
    return code if code is not None else fail(f"{command} is missing on this machine: install it; services need it")


def try_call(command: str, *arguments: str, endless: bool = False) -> int | None:
    """Run a program of the system as `call` does and return its exit code; None if the program is missing."""
    if shutil.which(command) is None:
        return None
    return subprocess.run([command, *arguments], timeout=None if endless else TIMEOUT_S, check=False).returncode


def call_well(command: str, *arguments: str) -> None:
    """Run a program of the system; end the command if it fails."""
    if call(command, *arguments):
        fail(f"`{command} {shlex.join(arguments)}` failed: see its message above")


def remove_files(*paths: Path) -> None:
    """Remove the files that exist."""
    for path in paths:
        path.unlink(missing_ok=True)


def show_log(path: Path, *, follow: bool) -> int:
    """Print the last 100 lines of a file, with `follow` also new ones, and return the exit code."""
    return call("tail", "-n", "100", *(["-f"] if follow else []), str(path), endless=follow)


UNIT = "swarmnode@.service"
PROGRAM = "%h/.local/bin/swarmnode"  # in the unit file; replaced by the program that installs it
LABEL = "org.swarmnode.{}"
SPECIAL = r'["\\`$]'  # in double quotes in a file of variables (systemd's src/basic/env-file.c)
AGAIN_S = 30  # pause after a failure
LEAVING_S = 30  # for conversations to move to other peers
TASK = "swarmnode-{}"
SCRIPT = """#!/bin/sh
# A node of {name}. It starts again after a failure, but not after wrong usage (exit code 2) or a normal end (0).
[ "$1" = stop ] && exec {stop}
exec >> {log} 2>&1
while :; do
    nice -n 10 {command}
    code=$?
    case $code in 0|2) exit $code ;; esac
    sleep 10
done
"""


class ScheduledTask:
    """Windows' task scheduler, which starts the node when the user logs in. WSL provides `schtasks.exe` and `wsl.exe`."""

    def write(self, service: Service) -> list[Path]:
        """Write the script that the task runs; see ServiceManager."""
        script, log = _script(service.name), shlex.quote(str(_task_log(service.name)))
        command, stop = shlex.join(service.command), shlex.join(service.stop_command)
        script.write_text(SCRIPT.format(name=service.name, log=log, command=command, stop=stop))
        script.chmod(0o700)
        return [script]

    def start(self, service: Service) -> str:
        """Start the service now and whenever the user logs in, and return where its log is."""
        for words in self.start_commands(service):
            call_well(*words)
        return f"Its log is {_task_log(service.name)}"

    def start_commands(self, service: Service) -> list[list[str]]:
        """Return the commands that create the task and run it."""
        runs = subprocess.list2cmdline(
            ["wsl.exe", "-d", os.environ["WSL_DISTRO_NAME"], "-e", str(_script(service.name))]
        )
        task = TASK.format(service.name)
        created = ["schtasks.exe", "/Create", "/F", "/SC", "ONLOGON", "/TN", task, "/TR", runs]
        return [created, ["schtasks.exe", "/Run", "/TN", task]]

    def status(self, name: str) -> int:
        """Print the state of the task and return the exit code of `schtasks.exe`."""
        return call("schtasks.exe", "/Query", "/TN", TASK.format(name))

    def logs(self, name: str, *, follow: bool) -> int:
        """Print the end of the service's log file and return the exit code of `tail`."""
        return show_log(_task_log(name), follow=follow)

    def remove(self, name: str) -> None:
        """Let the node leave its swarm in order, then remove the task and its files. Windows alone would end only `wsl.exe`."""
        try_call(str(_script(name)), "stop")  # fails if the node does not run
        if try_call("schtasks.exe", "/Delete", "/F", "/TN", TASK.format(name)):
            say("Windows did not remove the task: see its message above.", err=True)
        remove_files(_script(name), _task_log(name))


def _script(name: str) -> Path:
    return config_folder("swarmnode") / f"{name}.sh"


def _task_log(name: str) -> Path:
    return config_folder("swarmnode") / f"{name}.log"


class Launchd:
    """launchd of macOS: agents are property lists in ~/Library/LaunchAgents."""

    def write(self, service: Service) -> list[Path]:
        """Write the agent's property list; see ServiceManager."""
        agent, log = _agent(service.name), _log(service.name)
        for folder in (agent.parent, log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with agent.open("wb") as file:
            plistlib.dump(agent_of(service), file)
        return [agent]

    def start(self, service: Service) -> str:
        """Start the service now and whenever the user logs in, and return where its log is."""
        if call("launchctl", "print", _target(service.name)) == 0:  # an earlier one, perhaps with other options
            call_well("launchctl", "bootout", _target(service.name))
        for words in self.start_commands(service):
            call_well(*words)
        return f"Its log is {_log(service.name)}"

    def start_commands(self, service: Service) -> list[list[str]]:
        """Return the command that loads the agent."""
        return [["launchctl", "bootstrap", _domain(), str(_agent(service.name))]]

    def status(self, name: str) -> int:
        """Print the state of the agent and return the exit code of `launchctl`."""
        return call("launchctl", "print", _target(name))

    def logs(self, name: str, *, follow: bool) -> int:
        """Print the end of the service's log file and return the exit code of `tail`."""
        return show_log(_log(name), follow=follow)

    def remove(self, name: str) -> None:
        """Stop the agent and remove its property list; the log stays."""
        try_call("launchctl", "bootout", _target(name))  # fails if the agent does not run
        remove_files(_agent(name))


def agent_of(service: Service) -> dict[str, object]:
    """Return the property list of a service's agent."""
    log = str(_log(service.name))
    return {
        "Label": LABEL.format(service.name),
        "ProgramArguments": service.command,
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": AGAIN_S,
        "ExitTimeOut": LEAVING_S,
        "ProcessType": "Background",
        "Nice": 10,
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }


def _agent(name: str) -> Path:
    return Path.home() / "Library/LaunchAgents" / f"{LABEL.format(name)}.plist"


def _log(name: str) -> Path:
    return Path.home() / "Library/Logs/swarmnode" / f"{name}.log"


def _domain() -> str:
    if sys.platform == "win32":
        raise NotImplementedError("launchd is macOS's")
    return f"gui/{os.getuid()}"


def _target(name: str) -> str:
    return f"{_domain()}/{LABEL.format(name)}"


class Systemd:
    """systemd of the user: one unit file for all services, and a file of options for each."""

    @property
    def _unit(self) -> Path:
        return config_folder("systemd/user") / UNIT

    def write(self, service: Service) -> list[Path]:
        """Write the unit file and the service's options; see ServiceManager."""
        from swarmnode.files import write_private

        self._unit.parent.mkdir(parents=True, exist_ok=True)
        self._unit.write_text(unit_text())
        options = _options(service.name)
        words = " ".join(_double_quoted(word, r'["\\]') for word in service.all_options)  # $OPTIONS is split into words
        write_private(options, f"OPTIONS={_double_quoted(words, SPECIAL)}\n".encode())
        return [self._unit, options]

    def start(self, service: Service) -> str:
        """Start the service now, or restart it if it runs, and whenever the user logs in. Return a hint for the user."""
        for words in self.start_commands(service):
            call_well(*words)
        return "To keep it running while you are logged out: loginctl enable-linger"

    def start_commands(self, service: Service) -> list[list[str]]:
        """Return the commands that make systemd read the unit file, enable the service and start it."""
        steps = [["daemon-reload"], *([verb, f"swarmnode@{service.name}"] for verb in ("enable", "restart"))]
        return [["systemctl", "--user", *step] for step in steps]

    def status(self, name: str) -> int:
        """Print the state of the service and return the exit code of `systemctl`."""
        return call("systemctl", "--user", "status", "--no-pager", f"swarmnode@{name}")

    def logs(self, name: str, *, follow: bool) -> int:
        """Print the service's lines in the journal and return the exit code of `journalctl`."""
        arguments = ["--follow"] if follow else ["--no-pager", "--lines=100"]
        return call("journalctl", "--user", f"--unit=swarmnode@{name}", *arguments, endless=follow)

    def remove(self, name: str) -> None:
        """Stop the service and remove its options; remove the unit file too if no service is left. Without a user bus, as under
        `su`, systemd does not answer, and the links that enable the service are removed here."""
        unit = f"swarmnode@{name}"
        answers = try_call("systemctl", "--user", "disable", "--now", unit) == 0
        if not answers:
            say("systemd did not answer. If `swarmnode ps` still lists the node, `swarmnode stop` ends it.", err=True)
            remove_files(*self._unit.parent.glob(f"*.wants/{unit}.service"))
        remove_files(_options(name))
        if not list(config_folder("swarmnode").glob("*.conf")):
            remove_files(self._unit)
            if answers:
                call_well("systemctl", "--user", "daemon-reload")


def unit_text() -> str:
    """Return the package's unit file, with the path of the installed program in it."""
    text = resources.files("swarmnode.cli.lend").joinpath(UNIT).read_text()
    path, *arguments = program()
    return text.replace(PROGRAM, " ".join([_double_quoted(path.replace("%", "%%"), r'["\\]'), *arguments]))


def _double_quoted(text: str, special: str) -> str:
    """Return the text in double quotes, with a backslash before each character that matches `special`; unchanged if it needs no
    quotes."""
    return text if shlex.quote(text) == text else '"' + re.sub(special, r"\\\g<0>", text) + '"'


def _options(name: str) -> Path:
    return config_folder("swarmnode") / f"{name}.conf"


WSL = "WSL_DISTRO_NAME"  # set by WSL
SYSTEMD = Path("/run/systemd/system")  # exists if systemd runs the machine

NAME = argument(
    ..., "Name of a swarm that you joined; each has its own service.", metavar="NAME", autocompletion=complete_swarms
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
    from swarmnode.cli.options.swarm import full_name

    _check_name(name)
    advice = f"`swarmnode service install {name}` creates it"
    return full_name(name, _services(), f"there is no service {name}", none=advice)


def _check_name(name: str) -> None:
    """End the command if a service manager would need quotes around `name`."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
        fail(f"{name!r} cannot be a service's name; join the swarm under another name: swarmnode join --as friends", 2)


def _parsed(options: list[str]) -> dict[str, Any]:
    """Return the values of options of `swarmnode run`. Ends the command if an option is wrong: else the service would fail
    unseen."""
    from swarmnode.cli.main import app as commands

    run = typer.main.get_command(commands).commands["run"]  # type: ignore[attr-defined]  # it is a group
    return dict(run.make_context("swarmnode run", ["name", *options]).params)
