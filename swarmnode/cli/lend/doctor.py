"""`swarmnode doctor`: what may keep this machine from taking part, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarmnode.cli.terminal.console import HOME, JSON, default_home, print_json, reports_errors, say

if TYPE_CHECKING:
    from swarmnode.examination import Finding

SIGNS = {"good": "ok  ", "doubtful": "?   ", "bad": "BAD "}


@reports_errors
def doctor(
    swarm: str = typer.Argument(
        "", metavar="[SWARM]", help="Also try whether its bootstrap peers answer.", show_default=False
    ),
    online: bool = typer.Option(
        False,
        "--online",
        help="Also ask time and STUN servers of the internet, and the router: clock, kind of NAT, UPnP.",
    ),
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Examine this machine: versions, device, memory, disk, limits, network. Exit code 1 where something is bad.

    Example: swarmnode doctor friends
    """
    import asyncio

    from swarmnode.examination import examine_bootstraps, examine_machine

    folder = default_home(home)
    findings = examine_machine(folder)
    if online:
        from swarmnode.network_examination import examine_network

        findings += examine_network()
    if swarm:
        from swarmnode.swarm.storage.swarmfile import load_swarm

        findings += asyncio.run(examine_bootstraps(load_swarm(swarm, folder)))
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            _tell(finding)
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(1)


def _tell(finding: Finding) -> None:
    say(f"{SIGNS[finding.verdict]} {finding.what}: {finding.seen}")
    if finding.remedy:
        say(f"     -> {finding.remedy}")
