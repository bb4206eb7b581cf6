"""Services of systemd, of the user's own manager."""

from __future__ import annotations

import shlex
from importlib import resources
from pathlib import Path

from swarmnode.cli.lend.service.service import Service, call, call_well, config_folder, program

UNIT = "swarmnode@.service"
PROGRAM = "%h/.local/bin/swarmnode"  # what the unit has; the one that installs it takes its place


class Systemd:
    """One unit for all, and a file of options for each."""

    def __repr__(self) -> str:
        return f"<Systemd {self._unit}>"

    @property
    def _unit(self) -> Path:
        return config_folder("systemd/user") / UNIT

    def write(self, service: Service) -> list[Path]:
        """The unit, and the options; see ServiceManager."""
        from swarmnode.files.durable import write_private

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
