"""Commands `swarmnode why`, `why credit` and `why trace`: show the facts behind what a node, a peer or a swarm does, the receipts
that clients have signed for the work of this machine, and where the time of a session's tokens went."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.lend.lending import state_text
from swarmnode.cli.options.swarm import THIS_SWARM, ask, complete_swarms, open_swarm
from swarmnode.counting import counted
from swarmnode.terminal.console import HOME, JSON, LogOptions, command, fail, print_json, say
from swarmnode.terminal.formatting import format_duration, one_line, wrapped
from swarmnode.terminal.option import argument, option

if TYPE_CHECKING:
    from rich.table import Table

    from swarmnode.credit.receipts import WorkerCredit
    from swarmnode.measuring.trace import Timeline, Token

TOPICS = {
    "placement": "Layers",
    "routing": "Route",
    "admission": "Text",
    "lending": "Lending",
    "audit": "Check",
    "reachability": "Connection",
    "training": "Training",
}


@command
def why(
    about: str = argument(
        "",
        "A machine's name or the end of its id, a session's trace id, or a layer's number; default: this machine's nodes.",
        metavar="[PEER|SESSION|LAYER]",
    ),
    swarm: str = option(
        "",
        "Ask this swarm's directory instead of this machine's nodes.",
        metavar="SWARM",
        autocompletion=complete_swarms,
    ),
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Show each decision and the facts behind it.

    Learn why a node idles, pauses, refuses or holds its layers, why a machine is left out, and why a route was chosen.

    Example: swarmnode why 12
    """
    LogOptions().begin()
    explained = _ask_swarm(swarm, about, home) if swarm else _ask_nodes(about, home)
    if as_json:
        print_json(explained)
        return
    for node in explained:
        _tell(node, about)


def _ask_nodes(about: str, home: Path) -> list[dict[str, Any]]:
    from swarmnode.lending.control import running_gateways, running_nodes, tell_node

    asked = [*running_nodes(home).items()]
    asked += [(f"the gateway to {swarm}", path) for swarm, path in running_gateways(home).items()]
    answers = ((node, tell_node(path, "why", about=about)) for node, path in asked)
    explained = [{"node": node, **answer} for node, answer in answers if answer is not None]
    return explained or fail("no node runs here; ask a swarm's directory with --swarm NAME")


def _ask_swarm(swarm: str, about: str, home: Path) -> list[dict[str, Any]]:
    name, explained = ask(swarm, home, lambda client: (client.swarm.name, client.why(about)))
    return [{"node": f"the swarm {name}", "state": "as seen from here", **explained}]


def _tell(node: dict[str, Any], about: str) -> None:
    say(f"{node['node']}: {state_text(node)}")
    for fact in node["facts"]:
        say(wrapped(fact, "  ", "    "))
    for decision in node["decisions"]:
        ago = format_duration(max(0.0, time.time() - decision["at"]))
        often = f", {decision['times']} times" if decision["times"] > 1 else ""
        whom = f" ({', '.join(map(_called, decision['about']))})" if decision["about"] else ""
        say(wrapped(f"{TOPICS[decision['topic']]}, {ago} ago{often}: {decision['what']}{whom}", "  ", "    "))
        for fact in decision["facts"]:
            say(wrapped(fact, "    - ", "      "))
    if not node["facts"] and not node["decisions"]:
        say(f"  nothing is known about {one_line(about) or 'it'} here")


def _called(subject: str) -> str:
    """Return the part of an id that names it: the end of a peer's, the beginning of a session's."""
    return subject[:8] if re.fullmatch("[0-9a-f]{32}", subject) else subject[-8:]


SHOWN_CLIENTS = 20


@command
def credit(
    where: str = argument(
        "",
        "A swarm, for the receipts of this machine's nodes, or a folder of receipts; default: the swarm you used last.",
        metavar="[SWARM|FOLDER]",
        autocompletion=complete_swarms,
    ),
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Show what this machine gave, and who signed for it.

    Answers, hours and energy are of all nodes of this home. The clients that you worked for sign receipts, which count as credit,
    discounted: receipts of a single client do not count, those of two equal ones count half. Your friends could sign anything for
    you. In an open swarm a person is another client each time.

    Example: swarmnode why credit friends
    """
    from swarmnode.credit.receipts import folder_credits, summary, worker_credits
    from swarmnode.measuring.service_report import donation
    from swarmnode.swarm.storage.swarmfile import swarm_path

    is_folder = bool(where) and Path(where).is_dir() and not swarm_path(where).is_file()
    entries = folder_credits(Path(where)) if is_folder else worker_credits(home, open_swarm(where, home).id)
    given = None if is_folder else donation(home)
    if as_json:
        nodes = [{**summary(entry), "by_client": dict(entry.credit.by_client)} for entry in entries]
        print_json({"given": None if given is None else given.to_json(), "nodes": nodes})
        return
    if given is not None and given.any:
        say(wrapped(f"This machine gave {given}.{_today(home)}"))
    if not entries:
        say("No receipts here yet. The clients that you work for sign them when an answer ends.")
        return
    from swarmnode.terminal.tables import show

    for entry in entries:
        say(wrapped(_credit_sentence(entry)))
        show(_credit_table(entry))


def _today(home: Path) -> str:
    """Return a sentence on today's energy; empty if no card measures it."""
    from swarmnode.lending.cards import JOULES_PER_KWH, energy_used

    energy = energy_used(home)
    return "" if energy is None else f" Today its GPUs drew {energy.today_j / JOULES_PER_KWH:.2f} kWh."


def _credit_sentence(entry: WorkerCredit) -> str:
    credit, signers = entry.credit, counted(entry.credit.clients, "client")
    kinds = f" ({credit.served:,} for answers, {credit.trained:,} for training, which counts three times)"
    if credit.clients == 1:
        counts = "No credit yet: it needs work for at least two people. Among friends, go by the amount signed."
    else:
        counts = (
            f"Of that, {credit.counted:,.0f} counts as credit: work for many people counts more than work for a few."
        )
    return (
        f"Your node {entry.worker[-8:]}: {signers} signed for {credit.signed:,} tokens through a layer"
        f"{kinds if credit.trained else ''}. {counts}"
    )


def _credit_table(entry: WorkerCredit) -> Table:
    from swarmnode.terminal.tables import new_table

    credit = entry.credit
    total = credit.signed
    table = new_table("", ("signed by", "tokens x layers", "share"), numbers=("tokens x layers", "share"))
    ranked = sorted(credit.by_client.items(), key=lambda item: (-item[1], item[0]))
    for client, work in ranked[:SHOWN_CLIENTS]:
        table.add_row(client[-8:], f"{work:,}", f"{work / total:.1%}")
    if rest := ranked[SHOWN_CLIENTS:]:
        work = sum(work for _, work in rest)
        table.add_row(counted(len(rest), "other"), f"{work:,}", f"{work / total:.1%}")
    return table


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
    from swarmnode.measuring.meters import by_proposer
    from swarmnode.measuring.trace import Timeline, parse_trace_id

    trace_id = parse_trace_id(session)
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
