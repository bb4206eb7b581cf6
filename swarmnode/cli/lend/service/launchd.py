"""Services of macOS: an agent of the user's for each, which launchd starts when the user logs in."""

from __future__ import annotations

import os
import plistlib
import sys
from pathlib import Path

from swarmnode.cli.lend.service.service import Service, call, call_well, show_log

LABEL = "org.swarmnode.{}"
AGAIN_S = 30  # after a failure
LEAVING_S = 30  # conversations move to other peers


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
