"""Command `swarmnode verify`: have a receipt's text computed again, and say what was proved, by whom, and what not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.swarm import SWARM, ask
from swarmnode.counting import counted
from swarmnode.errors import ProtocolError
from swarmnode.files import read_bounded
from swarmnode.terminal.console import HOME, JSON, LogOptions, command, fail, print_json, say
from swarmnode.terminal.formatting import format_duration, wrapped
from swarmnode.terminal.option import argument

if TYPE_CHECKING:
    from swarmnode.client.swarm_client import SwarmClient


@command
def verify(
    *,
    receipt: Path = argument(
        ..., "File that `swarmnode generate --receipt FILE` wrote.", typed=Path, metavar="RECEIPT"
    ),
    swarm: str = SWARM,
    home: Path = HOME,
    as_json: bool = JSON,
    logs: LogOptions,
) -> None:
    """Check who computed a text, to the bit.

    For each machine that computed it, two others of its class of equal bits compute the text again. If both have its
    results to the bit, its work is proved; if both agree on others, it is refuted. One machine's word alone decides
    nothing. A class is a kind of machine whose results are equal to the bit (packed weights, or run --equal-bits).

    The exit code is 0 if all is proved, 1 if not, 2 for a file that is no receipt of this swarm.

    Example: swarmnode verify story.receipt friends
    """
    logs.begin()
    from swarmnode.audits.text_receipts import MAX_BYTES

    try:
        raw = read_bounded(receipt, MAX_BYTES)
    except OSError as error:
        fail(f"cannot read {receipt}: {error.strerror or error}", 2)
    if raw is None:
        fail(f"{receipt} is no receipt of a text: it is too large, or not there", 2)
    report = ask(swarm, home, lambda client: check(client, raw))
    if as_json:
        print_json(report)
    else:
        _tell(report)
    if not report["proved"]:
        fail("not all of this text is proved")


async def check(client: SwarmClient, raw: bytes) -> dict[str, Any]:
    """Return the report on a receipt. Ends the command with exit code 2 if it is no receipt of this swarm."""
    from swarmnode.audits.text_receipts import report_on

    try:
        return await report_on(client.auditor, client.auditor.replays, raw)
    except ProtocolError as error:
        return fail(f"this is no receipt of a text of the swarm {client.swarm.name}: {error}", 2)


def _tell(report: dict[str, Any]) -> None:
    ago = format_duration(max(0.0, time.time() - report["at"]))
    say(f"{counted(report['tokens'], 'token')}, ordered by {report['client'][-8:]} {ago} ago")
    for hop in report["hops"]:
        start, end = hop["span"]
        by = f" by {' and '.join(peer[-8:] for peer in hop['by'])}" if hop["by"] else ""
        why = f": {hop['why']}" if hop["why"] else ""
        say(wrapped(f"layers {start} to {end - 1}, {hop['peer'][-8:]}: {hop['result']}{by}{why}", "  ", "    "))
