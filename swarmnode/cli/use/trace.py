"""Command `swarmnode why trace`: show where the time of a session's tokens went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.asking import ask
from swarmnode.cli.options.swarm import THIS_SWARM
from swarmnode.codec.measuring_messages import TRACE_ID_BYTES
from swarmnode.terminal.console import HOME, JSON, LogOptions, command, fail, print_json, say
from swarmnode.terminal.option import argument, option

if TYPE_CHECKING:
    from rich.table import Table

    from swarmnode.measuring.trace import Timeline, Token

WORDS = {"wait": "waited at", "compute": "computed at", "leave": "kept back at", "way": "on the way"}


@command
def trace(
    *,
    swarm: str = THIS_SWARM,
    session: str = argument(
        ..., "Trace id of the session, from `generate --json` or --verbose, or a JSON log line.", metavar="ID"
    ),
    slowest: int = option(5, "Show this many of the slowest tokens.", "--slowest", "-n", min=0),
    home: Path = HOME,
    as_json: bool = JSON,
    logs: LogOptions,
) -> None:
    """Show where a text's slow tokens spent their time.

    They wait or are computed at a machine, or are on the way. Machines remember the last 512 steps of running sessions and of the
    last 64 that ended.

    Example: swarmnode why trace friends.swarm 5f2a61c09be34d17a8f0c2d94be17763
    """
    logs.begin()
    trace_id = parse_trace_id(session)
    from swarmnode.measuring.meters import by_proposer
    from swarmnode.measuring.trace import Timeline

    timeline = Timeline(ask(swarm, home, lambda client: client.traces(trace_id)))
    if not timeline.stops:
        fail(f"no machine that is online remembers the session {session}; check the id")
    if as_json:
        print_json(timeline_json(session, timeline, slowest))
        return
    from swarmnode.terminal.tables import show

    show(hops_table(timeline), tokens_table(timeline.slowest(slowest)))
    for proposer, count in by_proposer(timeline.drafts).items():
        say(
            f"Guesses by {proposer}: {count['drafted']}, of them {count['accepted']} right and {count['wasted']} in vain"
        )


def parse_trace_id(text: str) -> bytes:
    """Return the bytes of a trace id in hex. Ends the command if `text` is none."""
    try:
        trace = bytes.fromhex(text)
    except ValueError:
        trace = b""
    if len(trace) != TRACE_ID_BYTES:
        fail(f"a trace id is {2 * TRACE_ID_BYTES} hex digits, not {text!r}", 2)
    return trace


def hops_table(timeline: Timeline) -> Table:
    """Return a table with one row per hop: its number of tokens, its guesses if there are any, and the median and the worst of the
    tokens' waits and computing (in milliseconds) and batch sizes."""
    from swarmnode.terminal.tables import new_table

    guesses = ("guessed", "in vain") if any(stop.guessed for stop in timeline.stops) else ()
    numbers = ("tokens", *guesses, "wait ms", "compute ms", "batch")
    table = new_table("hops: median / worst of their tokens", ("peer", "layers", *numbers), numbers=numbers)
    for stop in timeline.stops:
        start, end = stop.span
        wait, compute, batch = stop.wait_us, stop.compute_us, stop.batch
        table.add_row(
            stop.peer[-8:],
            f"{start}:{end}",
            str(len(stop.decoded)),
            *((str(stop.guessed), str(stop.wasted)) if guesses else ()),
            f"{wait.median / 1e3:.1f} / {wait.worst / 1e3:.1f}",
            f"{compute.median / 1e3:.1f} / {compute.worst / 1e3:.1f}",
            f"{batch.median:g} / {batch.worst}",
        )
    return table


def tokens_table(tokens: list[Token]) -> Table:
    """Return a table with one row per token: its milliseconds, and where most of them went."""
    from swarmnode.terminal.tables import new_table

    numbers = ("position", "ms", "waiting", "computing", "kept back", "on the way")
    table = new_table("slowest tokens", (*numbers, "most of it"), numbers=numbers)
    for token in tokens:
        sums = [sum(part.us for part in token.parts if part.what == what) for what in WORDS]
        figures = [f"{us / 1e3:.1f}" for us in (token.us, *sums)]
        if token.total_us is None:
            figures[-1] = "?"
        # Where most of the time went, as in `computed at bX3fQ9aa: 83.1 ms`
        part, late = token.longest, token.late
        where = WORDS[part.what] + (f" {part.peer[-8:]}: {part.us / 1e3:.1f} ms" if part.peer else "")
        if part.what == "way" and late is not None:
            where += f", {late.us / 1e3:.1f} ms more than usual from {late.source[-8:]} to {late.target[-8:]}"
        table.add_row(str(token.position), *figures, where)
    return table


def timeline_json(session: str, timeline: Timeline, slowest: int) -> dict[str, Any]:
    """Return a timeline as a JSON object for scripts; times in seconds. `late` of a token is the part of its way that took longer
    than usual, or None."""
    from swarmnode.measuring.meters import by_proposer

    hops = [
        {
            "peer": stop.peer,
            "span": list(stop.span),
            "tokens": len(stop.decoded),
            "guessed": stop.guessed,
            "wasted": stop.wasted,
            "drafts": by_proposer(stop.drafts),
            "wait_s": {"median": stop.wait_us.median / 1e6, "worst": stop.wait_us.worst / 1e6},
            "compute_s": {"median": stop.compute_us.median / 1e6, "worst": stop.compute_us.worst / 1e6},
            "batch": stop.batch._asdict(),
        }
        for stop in timeline.stops
    ]
    tokens = [
        {
            "position": token.position,
            "seconds": token.us / 1e6,
            "parts": [{"what": part.what, "peer": part.peer or None, "seconds": part.us / 1e6} for part in token.parts],
            "late": None
            if (late := token.late) is None
            else {"from": late.source, "to": late.target, "seconds": late.us / 1e6},
        }
        for token in timeline.slowest(slowest)
    ]
    return {"trace": session, "hops": hops, "slowest": tokens}
