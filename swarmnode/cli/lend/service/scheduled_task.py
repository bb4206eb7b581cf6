"""Services of Windows for a WSL without systemd: a scheduled task for each, which starts a script in the distribution."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from swarmnode.cli.lend.service.service import Service, call, call_well, config_folder, show_log

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
        script, log = _script(service.name), shlex.quote(str(_log(service.name)))
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
        return f"It says what it does in {_log(service.name)}"

    def status(self, name: str) -> int:
        """As Windows has it."""
        return call("schtasks.exe", "/Query", "/TN", TASK.format(name))

    def logs(self, name: str, *, follow: bool) -> int:
        """Out of its file."""
        return show_log(_log(name), follow=follow)

    def remove(self, name: str) -> None:
        """It leaves in order first: what Windows ends is `wsl.exe` alone."""
        call(str(_script(name)), "stop")  # fails where it does not run
        call("schtasks.exe", "/Delete", "/F", "/TN", TASK.format(name))
        for path in (_script(name), _log(name)):
            path.unlink(missing_ok=True)


def _script(name: str) -> Path:
    return config_folder("swarmnode") / f"{name}.sh"


def _log(name: str) -> Path:
    return config_folder("swarmnode") / f"{name}.log"
