"""Managers of services: systemd's of the user, launchd's agents (macOS), and Windows' scheduled tasks (WSL)."""

from __future__ import annotations

import os
import plistlib
import shlex
import sys
from importlib import resources
from pathlib import Path

from swarmnode.cli.lend.service.service import Service, call, call_well, config_folder, program, show_log

UNIT = "swarmnode@.service"
PROGRAM = "%h/.local/bin/swarmnode"  # what the unit has; the one that installs it takes its place
LABEL = "org.swarmnode.{}"
AGAIN_S = 30  # after a failure
LEAVING_S = 30  # conversations move to other peers
TASK = "swarmnode-{}"
SCRIPT = """#!/bin/sh
# A node of {name}, begun anew after a failure, and not where it says that it was told something wrong (2) or is to end (0).
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
    """Started by Windows when the user logs in. `schtasks.exe` and `wsl.exe` are there within WSL."""

    def __repr__(self) -> str:
        return f"<ScheduledTask {TASK.format('*')}>"

    def write(self, service: Service) -> list[Path]:
        """The script; see ServiceManager."""
        script, log = _script(service.name), shlex.quote(str(_task_log(service.name)))
        command, stop = shlex.join(service.command), shlex.join(service.stop_command)
        script.write_text(SCRIPT.format(name=service.name, log=log, command=command, stop=stop))
        script.chmod(0o700)
        return [script]

    def start(self, service: Service) -> str:
        """Now, and whenever the user logs in."""
        runs = f"wsl.exe -d {os.environ['WSL_DISTRO_NAME']} -e {_script(service.name)}"
        task = TASK.format(service.name)
        call_well("schtasks.exe", "/Create", "/F", "/SC", "ONLOGON", "/TN", task, "/TR", runs)
        call_well("schtasks.exe", "/Run", "/TN", task)
        return f"It says what it does in {_task_log(service.name)}"

    def status(self, name: str) -> int:
        """As Windows has it."""
        return call("schtasks.exe", "/Query", "/TN", TASK.format(name))

    def logs(self, name: str, *, follow: bool) -> int:
        """Out of its file."""
        return show_log(_task_log(name), follow=follow)

    def remove(self, name: str) -> None:
        """It leaves in order first: what Windows ends is `wsl.exe` alone."""
        call(str(_script(name)), "stop")  # fails where it does not run
        call("schtasks.exe", "/Delete", "/F", "/TN", TASK.format(name))
        for path in (_script(name), _task_log(name)):
            path.unlink(missing_ok=True)


def _script(name: str) -> Path:
    return config_folder("swarmnode") / f"{name}.sh"


def _task_log(name: str) -> Path:
    return config_folder("swarmnode") / f"{name}.log"


class Launchd:
    """Property lists in ~/Library/LaunchAgents."""

    def __repr__(self) -> str:
        return f"<Launchd {_agent('*')}>"

    def write(self, service: Service) -> list[Path]:
        """The agent; see ServiceManager."""
        agent, log = _agent(service.name), _log(service.name)
        for folder in (agent.parent, log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with agent.open("wb") as file:
            plistlib.dump(agent_of(service), file)
        return [agent]

    def start(self, service: Service) -> str:
        """Now, and whenever the user logs in."""
        if call("launchctl", "print", _target(service.name)) == 0:  # an earlier one, with other options perhaps
            call_well("launchctl", "bootout", _target(service.name))
        call_well("launchctl", "bootstrap", _domain(), str(_agent(service.name)))
        return f"It says what it does in {_log(service.name)}"

    def status(self, name: str) -> int:
        """As launchd has it."""
        return call("launchctl", "print", _target(name))

    def logs(self, name: str, *, follow: bool) -> int:
        """Out of its file."""
        return show_log(_log(name), follow=follow)

    def remove(self, name: str) -> None:
        """The log stays."""
        call("launchctl", "bootout", _target(name))  # fails where it does not run
        _agent(name).unlink(missing_ok=True)


def agent_of(service: Service) -> dict[str, object]:
    """What launchd reads of it."""
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
    """One unit for all, and a file of options for each."""

    def __repr__(self) -> str:
        return f"<Systemd {self._unit}>"

    @property
    def _unit(self) -> Path:
        return config_folder("systemd/user") / UNIT

    def write(self, service: Service) -> list[Path]:
        """The unit, and the options; see ServiceManager."""
        from swarmnode.files import write_private

        self._unit.parent.mkdir(parents=True, exist_ok=True)
        self._unit.write_text(unit_text())
        options = _options(service.name)
        write_private(options, f"OPTIONS={shlex.join(service.all_options)}\n".encode())
        return [self._unit, options]

    def start(self, service: Service) -> str:
        """Now, anew where it runs with other options, and whenever the user logs in."""
        call_well("systemctl", "--user", "daemon-reload")
        for command in ("enable", "restart"):
            call_well("systemctl", "--user", command, f"swarmnode@{service.name}")
        return "To have it run while you are not logged in, too: loginctl enable-linger"

    def status(self, name: str) -> int:
        """As systemd has it."""
        return call("systemctl", "--user", "status", "--no-pager", f"swarmnode@{name}")

    def logs(self, name: str, *, follow: bool) -> int:
        """Out of the journal."""
        arguments = ["--follow"] if follow else ["--no-pager", "--lines=100"]
        return call("journalctl", "--user", f"--unit=swarmnode@{name}", *arguments, endless=follow)

    def remove(self, name: str) -> None:
        """With the unit, where it was the last service."""
        call_well("systemctl", "--user", "disable", "--now", f"swarmnode@{name}")
        _options(name).unlink(missing_ok=True)
        if not list(config_folder("swarmnode").glob("*.conf")):
            self._unit.unlink(missing_ok=True)
            call_well("systemctl", "--user", "daemon-reload")


def unit_text() -> str:
    """The unit of this package, with the program that it starts."""
    text = resources.files("swarmnode.cli.lend.service").joinpath(UNIT).read_text()
    return text.replace(PROGRAM, " ".join(program()))


def _options(name: str) -> Path:
    return config_folder("swarmnode") / f"{name}.conf"
