"""What activations travel as between the stages of a swarm that trains, for `train`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import typer

from swarmnode.errors import UsageError

if TYPE_CHECKING:
    from swarmnode.swarm.records.run import Compression

COMPRESS = typer.Option(
    "auto",
    "--compress",
    metavar="auto|none|bf16|int8|int4|topk|adatopk|slowest",
    help="What goes from stage to stage: auto as each node sees fit; adatopk the fewer, the slower the link.",
)
TOPK_RATIO = typer.Option(
    0.0,
    "--topk-ratio",
    metavar="R",
    help="Of topk, adatopk, slowest: one of R elements is sent, on the slowest link; default: 100.",
    show_default=False,
)
TOPK_FEEDBACK = typer.Option(False, "--topk-feedback", help="Add what top-k left out to what is sent next.")


def parse_compression(rule: str, ratio: float, *, feedback: bool) -> Compression:
    """What these options mean; a ratio of 0 is not given. Raises UsageError."""
    from swarmnode.config import COMPRESSIONS
    from swarmnode.plan.sparsity import SPARSE_RULES
    from swarmnode.swarm.records.run import MAX_RATIO, Compression

    if rule not in COMPRESSIONS:
        raise UsageError(f"--compress {rule}: it is one of {', '.join(COMPRESSIONS)}")
    if rule not in SPARSE_RULES and (ratio or feedback):
        raise UsageError(f"--topk-ratio and --topk-feedback go with --compress {', '.join(SPARSE_RULES)}")
    if not ratio:
        return Compression(rule, feedback=feedback)
    if not (math.isfinite(ratio) and 1 <= ratio <= MAX_RATIO):
        raise UsageError(f"--topk-ratio {ratio:g}: it is a number from 1 to {MAX_RATIO:.0f}")
    return Compression(rule, ratio, feedback)
