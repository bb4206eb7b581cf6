"""Command `swarmnode doctor`: find what keeps this machine from taking part, and how to mend it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarmnode.cli.options.swarm import complete_swarms
from swarmnode.errors import LocalError, NetworkDown
from swarmnode.terminal.console import (
    HOME,
    JSON,
    command,
    fail,
    is_piped,
    make_room,
    print_json,
    print_result,
    run_async,
    say,
)
from swarmnode.terminal.formatting import wrapped
from swarmnode.terminal.option import argument, option
from swarmnode.terminal.progress import spinner
from swarmnode.version import __version__, update_command

if TYPE_CHECKING:
    from swarmnode.examination import Finding
    from swarmnode.swarm.storage.swarmfile import Swarm

SIGNS = {"good": "ok  ", "doubtful": "?   ", "bad": "BAD "}


BANDWIDTH_PEERS = 3
JOIN_PATIENCE_S = 15.0


@command
def doctor(
    swarm: str = argument(
        "",
        "Also test whether this swarm answers and speaks your version.",
        metavar="[SWARM]",
        autocompletion=complete_swarms,
    ),
    online: bool = option(False, "Also check clock, kind of NAT and UPnP, by asking internet servers and the router."),
    bandwidth: bool = option(False, "Also test upload and download with machines of the swarm; asks first."),
    yes: bool = option(False, "Do not ask before the test."),
    show_id: bool = option(
        False, "Only print this machine's id, for an invite to this machine alone (`invite --peer`).", "--id"
    ),
    client: bool = option(False, "With --id: print the id that chat, generate and train use."),
    update: bool = option(False, "Only print the command that updates this installation."),
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Check this machine, and say what to mend.

    It checks versions, device, memory, disk, limits and network. The exit code is 1 if something is bad.

    Example: swarmnode doctor friends --bandwidth
    """
    if update:
        told = f"This is swarmnode {__version__}. To update it, run\n  {update_command()}\nand restart your nodes."
        print_result({"version": __version__, "command": update_command()}, told, as_json=as_json)
        return
    if show_id:
        from swarmnode.net.identity import Identity

        peer_id = Identity.load_or_create(home / f"{'client' if client else 'node'}.key").peer_id
        print_result({"id": peer_id}, peer_id, as_json=as_json)
        return
    if client:
        fail("--client needs --id", 2)
    if bandwidth and not swarm:
        fail("--bandwidth tests with machines of a swarm: name it, as in swarmnode doctor friends --bandwidth", 2)
    if bandwidth and not yes:
        _ask_for_bandwidth(swarm)
    from swarmnode.examination import examine_machine
    from swarmnode.swarm.storage.swarmfile import load_swarm

    loaded = load_swarm(swarm, home) if swarm else None
    findings: list[Finding] = []

    def examine(what: str, examination: Callable[[], list[Finding]]) -> None:
        """Make one examination, and tell people what it found before the next one begins."""
        with spinner(what, quiet=as_json):
            found = examination()
        findings.extend(found)
        for finding in () if as_json else found:
            _tell(finding)

    examine("Looking at this machine", lambda: examine_machine(home))
    if online:
        from swarmnode.examination import examine_network

        examine("Asking time servers, STUN servers and the router", examine_network)
    if loaded is not None:
        examine(f"Asking {loaded.name}", lambda: run_async(lambda _stop: _examine_swarm(loaded, home, bandwidth)))
    if as_json:
        print_json([finding._asdict() for finding in findings])
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(1)


def _ask_for_bandwidth(swarm: str) -> None:
    if is_piped():
        fail("--bandwidth asks first, but there is no terminal: add --yes", 2)
    from swarmnode.measuring.bandwidth import TEST_BYTES

    most = f"{BANDWIDTH_PEERS * TEST_BYTES / 1e6:.1f} MB"
    question = f"This sends up to {most} to {BANDWIDTH_PEERS} machines of {swarm} and receives as much. Go on?"
    make_room(again=False)
    typer.confirm(question, default=True, abort=True, err=True)


async def _examine_swarm(swarm: Swarm, home: Path, bandwidth: bool) -> list[Finding]:
    """Examine a swarm's bootstrap peers from outside; then join as a client if one of them answers. An invite that this machine has
    not used yet is only looked at, since joining would count a use; a test of the bandwidth joins all the same."""
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.examination import (
        Finding,
        examine_bootstraps,
        judge_bandwidth,
        judge_invite,
        judge_versions,
        judge_weights,
    )
    from swarmnode.membership.access_control import is_first_use
    from swarmnode.swarm.storage.content import PACKED_NAME

    findings = await examine_bootstraps(swarm)
    if all(finding.verdict == "bad" for finding in findings):
        return findings
    if not bandwidth and is_first_use(swarm, home):
        return [*findings, judge_invite(swarm, time.time())]
    try:
        async with await SwarmClient.join(swarm, home=home, patience_s=JOIN_PATIENCE_S, audit_share=0.0) as client:
            measured = await client.bandwidth(BANDWIDTH_PEERS) if bandwidth else None
            is_packed = client.manifest.file(PACKED_NAME) is not None
            outline = await client.outline() if is_packed else None
            findings += [judge_versions(client.peer_versions), *judge_weights(client.manifest, outline)]
    except (NetworkDown, LocalError) as error:
        remedy = "ask the person who invited you, or the swarm's host"
        return [*findings, Finding("membership", "bad", str(error), remedy)]
    return findings + (judge_bandwidth(measured) if measured is not None else [])


def _tell(finding: Finding) -> None:
    indent = " " * 5
    say(wrapped(f"{finding.what}: {finding.seen}", f"{SIGNS[finding.verdict]} ", indent))
    if finding.remedy:
        say(wrapped(finding.remedy, f"{indent}-> ", f"{indent}   "))
