"""Service managers: systemd for the user, launchd's agents (macOS), and Windows' scheduled tasks (WSL)."""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import subprocess
import sys
from importlib import resources
from pathlib import Path

from swarmnode.cli.lend.service.service import (
    Service,
    call,
    call_well,
    config_folder,
    program,
    remove_files,
    show_log,
    try_call,
)
from swarmnode.terminal.console import say

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
        for command in self.start_commands(service):
            call_well(*command)
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
        for command in self.start_commands(service):
            call_well(*command)
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
        for command in self.start_commands(service):
            call_well(*command)
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
    text = resources.files("swarmnode.cli.lend.service").joinpath(UNIT).read_text()
    path, *arguments = program()
    return text.replace(PROGRAM, " ".join([_double_quoted(path.replace("%", "%%"), r'["\\]'), *arguments]))


def _double_quoted(text: str, special: str) -> str:
    """Return the text in double quotes, with a backslash before each character that matches `special`; unchanged if it needs no
    quotes."""
    return text if shlex.quote(text) == text else '"' + re.sub(special, r"\\\g<0>", text) + '"'


def _options(name: str) -> Path:
    return config_folder("swarmnode") / f"{name}.conf"
