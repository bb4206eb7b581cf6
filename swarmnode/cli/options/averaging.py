"""How replicas that train come to one gradient, for `train` and `simulate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from swarmnode.errors import UsageError

if TYPE_CHECKING:
    from swarmnode.swarm.records.run import Averaging

CODECS = ("none", "bf16", "fp16", "int8", "int4", "topk")

AVERAGE_EVERY = typer.Option(
    1, "--average-every", min=1, help="Steps between two averagings of replicas; above 1: as DiLoCo does."
)
AVERAGE_CODEC = typer.Option("none", "--average-codec", metavar="|".join(CODECS), help="Of what they send.")
AVERAGE_RANK = typer.Option(0, "--average-rank", min=0, max=1024, help="Above 0: PowerSGD of that rank.")


def parse_averaging(every: int, codec: str, rank: int, *, robust: bool = False) -> Averaging:
    """What these options mean. Raises UsageError."""
    from swarmnode.codec.tensors import Codec
    from swarmnode.swarm.records.run import Averaging

    if codec not in CODECS:
        raise UsageError(f"--average-codec {codec}: it is one of {', '.join(CODECS)}")
    return Averaging(every=every, codec=Codec[codec.upper()], rank=rank, robust=robust)
