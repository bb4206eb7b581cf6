"""How replicas that train come to one gradient, for `train` and `simulate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from swarmnode.errors import UsageError

if TYPE_CHECKING:
    from swarmnode.swarm.records.run import Averaging

CODECS = ("none", "bf16", "fp16", "int8", "int4", "topk", "topk2")
SPARSE_LOCO = {"keep": 0.02, "outer_momentum": 0.0}  # arXiv 2508.15706: error feedback takes the place of momentum

AVERAGE_EVERY = typer.Option(
    1, "--average-every", min=1, help="Steps between two averagings of replicas; above 1: as DiLoCo does."
)
AVERAGE_CODEC = typer.Option(
    "none", "--average-codec", metavar="|".join(CODECS), help="Of what they send; topk2 is SparseLoCo's."
)
AVERAGE_KEEP = typer.Option(
    0.0,
    "--average-keep",
    help="Of topk, topk2: the share of the elements that is sent; default: 0.05, of topk2 0.02.",
    show_default=False,
)
AVERAGE_RANK = typer.Option(0, "--average-rank", min=0, max=1024, help="Above 0: PowerSGD of that rank.")
AVERAGE_ALTERNATING = typer.Option(
    False,
    "--average-alternating",
    help="With --average-rank: one factor in a step and the other in the next, as ACP-SGD does; half of the bytes.",
)
AVERAGE_BY_LINE = typer.Option(
    False,
    "--average-by-line",
    help="Replicas with slow lines send less: a stronger codec than --average-codec, or fewer elements of topk, topk2.",
)
OUTER_LR = typer.Option(
    -1.0,
    "--outer-lr",
    help="With --average-every: the outer optimiser's learning rate; default: 1.",
    show_default=False,
)
OUTER_MOMENTUM = typer.Option(
    -1.0,
    "--outer-momentum",
    help="With --average-every: its Nesterov momentum; default: 0.5, with topk2 0.",
    show_default=False,
)


def fine_settings(every: int, codec: str, *, keep: float, outer_lr: float, outer_momentum: float) -> dict[str, float]:
    """Those of Averaging's fields that are given. Raises UsageError where they are out of bounds, or go with nothing."""
    given = {
        "keep": (keep, 0.0, "--average-keep", "a share above 0, up to 1", 0 < keep <= 1),
        "outer_lr": (outer_lr, -1.0, "--outer-lr", "a number above 0, up to 10", 0 < outer_lr <= 10),
        "outer_momentum": (
            outer_momentum,
            -1.0,
            "--outer-momentum",
            "a number from 0, below 1",
            0 <= outer_momentum < 1,
        ),
    }
    found = {name: value for name, (value, default, *_) in given.items() if value != default}
    for name, value in found.items():
        _, _, flag, bounds, is_sound = given[name]
        if not is_sound:
            raise UsageError(f"{flag} {value:g}: it is {bounds}")
    if "keep" in found and codec not in ("topk", "topk2"):
        raise UsageError("--average-keep goes with --average-codec topk or topk2")
    if every == 1 and {"outer_lr", "outer_momentum"} & found.keys():
        raise UsageError("--outer-lr and --outer-momentum go with --average-every above 1")
    return found


def parse_averaging(
    every: int,
    codec: str,
    rank: int,
    *,
    by_line: bool = False,
    robust: bool = False,
    alternating: bool = False,
    **fine: float,
) -> Averaging:
    """What these options mean; `fine` are other fields of it. Raises UsageError."""
    from swarmnode.codec.tensors import Codec
    from swarmnode.swarm.records.run import Averaging

    if codec not in CODECS:
        raise UsageError(f"--average-codec {codec}: it is one of {', '.join(CODECS)}")
    if by_line and rank:
        raise UsageError("--average-by-line goes with a codec, and not with --average-rank: factors are of one size")
    if alternating and not rank:
        raise UsageError("--average-alternating goes with --average-rank: what alternates are factors")
    if codec == "topk2":
        fine = {**SPARSE_LOCO, **fine}
    return Averaging(
        every=every,
        codec=Codec[codec.upper()],
        rank=rank,
        by_line=by_line,
        robust=robust,
        alternating=alternating,
        **fine,
    )
