"""Command `swarmnode why credit`: show what this machine gave, and the receipts that clients have signed for its work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.cli.options.swarm import complete_swarms, open_swarm
from swarmnode.counting import counted
from swarmnode.terminal.console import HOME, JSON, command, print_json, say
from swarmnode.terminal.formatting import wrapped
from swarmnode.terminal.option import argument

if TYPE_CHECKING:
    from rich.table import Table

    from swarmnode.credit.receipts import WorkerCredit

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
        say(wrapped(_sentence(entry)))
        show(_table(entry))


def _today(home: Path) -> str:
    """Return a sentence on today's energy; empty if no card measures it."""
    from swarmnode.lending.cards import JOULES_PER_KWH, energy_used

    energy = energy_used(home)
    return "" if energy is None else f" Today its GPUs drew {energy.today_j / JOULES_PER_KWH:.2f} kWh."


def _sentence(entry: WorkerCredit) -> str:
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


def _table(entry: WorkerCredit) -> Table:
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
