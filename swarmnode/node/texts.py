"""What a node says to people."""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.codec.messages import VERSION
from swarmnode.counting import counted
from swarmnode.lending.lifecycle import LendingState
from swarmnode.plan.spans.placement import Move
from swarmnode.swarm.records.manifest import TRAIN, Manifest
from swarmnode.swarm.storage.content import Progress

PROGRESS_S = 15.0
STANDS_BY = "Standing by: training is faster without this node at the moment. It takes units as soon as they need it."
LENDING = {
    LendingState.DRAINING: "Pausing ({reason}): sessions move to other peers.",
    LendingState.FINISHING: "Finishing ({reason}): nothing new is taken.",
    LendingState.PAUSED: "Paused ({reason}).",
}

Tell = Callable[..., None]
"""(event, text for people, **details for scripts): what the node has to say as it lives"""


def introduce(manifest: Manifest) -> str:
    """What the swarm is about."""
    model = manifest.model
    named = model.hub_id or f"a {model.family}"
    does = "trains" if manifest.mode == TRAIN else "serves"
    return f"It {does} {named}: {counted(model.units, 'unit')}, {manifest.total_bytes / 1e9:.1f} GB"


def outdated(newer: int) -> str:
    """That others have a newer swarmnode."""
    return (
        f"Most peers here speak version {newer} of the protocol, this node {VERSION}: "
        "upgrade swarmnode when it suits you (pip install --upgrade swarmnode)."
    )


def reason_of(move: Move) -> str:
    """Why a node moves."""
    if not move.span.units:
        return "Training is faster without this node at the moment: it gives up its units and stands by"
    if move.fills:
        return f"Units {move.span} lack a holder: moving there"
    return f"With this node at units {move.span} the swarm does {move.gain:.0%} more: moving there"


def progress_of(tell: Tell, clock: Callable[[], float]) -> Progress:
    """Tells of every tenth of a download, and of a slow one now and then."""
    told, told_at = -1, clock()

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal told, told_at
        tenth = 10 * done_bytes // max(1, total_bytes)
        if tenth > told or clock() - told_at >= PROGRESS_S:
            told, told_at = tenth, clock()
            text = f"Fetching weights: {done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB"
            tell("fetching", text, done_bytes=done_bytes, total_bytes=total_bytes)

    return progress
