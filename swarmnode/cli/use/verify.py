"""Command `swarmnode verify`: have a receipt's text computed again, and say what was proved, by whom, and what not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from swarmnode.cli.options.swarm import SWARM, ask, open_swarm
from swarmnode.counting import counted
from swarmnode.errors import ProtocolError
from swarmnode.files import read_bounded
from swarmnode.swarm.records.statement import MAX_TEXT_RECEIPT_BYTES
from swarmnode.terminal.console import HOME, JSON, LogOptions, command, fail, print_json, say
from swarmnode.terminal.formatting import format_duration, wrapped
from swarmnode.terminal.option import argument


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

    A receipt does not expire: it can be verified as long as such machines are in the swarm.

    The exit code is 0 if all is proved, 1 if not, 2 for a file that is no receipt of this swarm.

    Example: swarmnode verify story.receipt friends
    """
    logs.begin()
    try:
        raw = read_bounded(receipt, MAX_TEXT_RECEIPT_BYTES)
    except OSError as error:
        fail(f"cannot read {receipt}: {error.strerror or error}", 2)
    if not raw:
        fail(f"{receipt} is no receipt of a text: it is {'empty' if raw is not None else 'too large'}", 2)
    loaded = open_swarm(swarm, home)
    from swarmnode.audits.text_receipts import open_receipt, report_on  # need torch

    try:
        open_receipt(raw, loaded.id)
    except ProtocolError as error:
        why = error.args[0] if error.peer else "it is damaged, or another kind of file"
        fail(f"{receipt} is no receipt of a text of the swarm {loaded.name}: {why}", 2)
    report = ask(loaded, home, lambda client: report_on(client.auditor, client.auditor.replays, raw))
    if as_json:
        print_json(report)
    else:
        _tell(report)
    refuted = [hop["peer"][-8:] for hop in report["hops"] if hop["result"] == "refuted"]
    if refuted:
        fail(f"{refuted[0]} did not compute this text as it signed")
    if not report["proved"]:
        fail("not all of this text is proved")


def _tell(report: dict[str, Any]) -> None:
    ago = format_duration(max(0.0, time.time() - report["at"]))
    say(f"{counted(report['tokens'], 'token')}, ordered by {report['client'][-8:]} {ago} ago")
    for hop in report["hops"]:
        start, end = hop["span"]
        asked = " by" if hop["result"] != "not proved" else ", asked"
        by = f"{asked} {' and '.join(peer[-8:] for peer in hop['by'])}" if hop["by"] else ""
        why = f": {hop['why']}" if hop["why"] else ""
        say(wrapped(f"layers {start} to {end - 1}, {hop['peer'][-8:]}: {hop['result']}{by}{why}", "  ", "    "))
