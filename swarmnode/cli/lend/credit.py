"""Command `swarmnode credit`: show the receipts that clients have signed for this machine's work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.cli.options.option import argument
from swarmnode.cli.options.swarm import open_swarm
from swarmnode.cli.terminal.console import HOME, JSON, command, print_json, say
from swarmnode.counting import counted

if TYPE_CHECKING:
    from rich.table import Table

    from swarmnode.credit.priorities import WorkerCredit
    from swarmnode.plan.credit import Credit

SHOWN_CLIENTS = 20


@command
def credit(
    where: str = argument(
        "",
        "A swarm, for the receipts of this machine's nodes, or a folder of receipts; default: the swarm you used last.",
        metavar="[SWARM|FOLDER]",
    ),
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Show the receipts for the work of this machine's nodes.

    Clients sign them, and they count as credit, discounted: receipts of a single client do not count, those of two equal ones count
    half. Your friends could sign anything for you.

    Example: swarmnode credit friends
    """
    from swarmnode.credit.priorities import folder_credits, summary, worker_credits
    from swarmnode.lending.energy import energy_used
    from swarmnode.swarm.storage.swarmfile import swarm_path

    if where and Path(where).is_dir() and not swarm_path(where).is_file():
        found = folder_credits(Path(where))
    else:
        found = worker_credits(home, open_swarm(where, home).id)
    if as_json:
        print_json([{**summary(one), "by_client": dict(one.credit.by_client)} for one in found])
        return
    if not found:
        say("No receipts here yet. Clients sign for a node's work when a session ends.")
        return
    from swarmnode.cli.terminal.tables import show

    for one in found:
        say(_sentence(one))
        show(_table(one))
    if (energy := energy_used(home)) is not None:
        say(f"This machine's GPUs drew {energy} while its nodes ran.")


def _sentence(one: WorkerCredit) -> str:
    credit, clients = one.credit, counted(one.credit.clients, "client")
    return (
        f"Node {one.worker[-8:]}: {clients} signed for {credit.signed:,} layers x tokens ({credit.served:,} served, "
        f"{credit.trained:,} trained, which counts three times). {_discount(credit)}"
    )


def _discount(credit: Credit) -> str:
    if credit.clients == 1:
        return (
            "None of it counts as credit, because a single client could be your own and sign for anything. "
            "Among people who know one another, go by the amount signed."
        )
    return (
        f"Of that, {credit.counted:,.0f} counts as credit: the fewer the clients, the less their receipts count "
        f"(discounted by their concentration of {credit.concentration:.2f})."
    )


def _table(one: WorkerCredit) -> Table:
    from swarmnode.cli.terminal.tables import new_table

    credit = one.credit
    total = credit.signed
    table = new_table("", ("client", "layers x tokens", "share"), numbers=("layers x tokens", "share"))
    ranked = sorted(credit.by_client.items(), key=lambda item: (-item[1], item[0]))
    for client, work in ranked[:SHOWN_CLIENTS]:
        table.add_row(client[-8:], f"{work:,}", f"{work / total:.1%}")
    if rest := ranked[SHOWN_CLIENTS:]:
        work = sum(work for _, work in rest)
        table.add_row(counted(len(rest), "other"), f"{work:,}", f"{work / total:.1%}")
    return table
