"""How replicas that train come to one gradient, for `train` and `simulate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnode.cli.options.option import option
from swarmnode.errors import UsageError

if TYPE_CHECKING:
    from swarmnode.swarm.records.run import Averaging

CODECS = ("none", "bf16", "fp16", "int8", "int4", "topk", "topk2")
SPARSE_LOCO = {"keep": 0.02, "outer_momentum": 0.0}  # arXiv 2508.15706: error feedback takes the place of momentum


def _within(bounds: str, is_sound: Callable[[float], bool]) -> Callable[[float, str], float]:
    def check(value: float, flag: str) -> float:
        if not is_sound(value):
            raise UsageError(f"{flag} {value:g}: it is {bounds}")
        return value

    return check


@dataclass(frozen=True)
class AveragingOptions:
    """Options of averaging. None is not given."""

    average_every: int = option(1, "Steps between two averagings of replicas; above 1: as DiLoCo does.", min=1)
    average_codec: str = option("none", "Of what they send; topk2 is SparseLoCo's.", choices=CODECS)
    average_keep: float | None = option(
        None,
        "Of topk, topk2: the share of the elements that is sent; default: 0.05, of topk2 0.02.",
        text=0.0,
        parse=_within("a share above 0, up to 1", lambda share: 0 < share <= 1),
    )
    average_rank: int = option(0, "Above 0: PowerSGD of that rank.", min=0, max=1024)
    average_alternating: bool = option(
        False,
        "With --average-rank: one factor in a step and the other in the next, as ACP-SGD does; half of the bytes.",
    )
    average_by_line: bool = option(
        False,
        "Replicas with slow lines send less: a stronger codec than --average-codec, or fewer elements of topk, topk2.",
    )
    outer_lr: float | None = option(
        None,
        "With --average-every: the outer optimiser's learning rate; default: 1.",
        text=-1.0,
        parse=_within("a number above 0, up to 10", lambda rate: 0 < rate <= 10),
    )
    outer_momentum: float | None = option(
        None,
        "With --average-every: its Nesterov momentum; default: 0.5, with topk2 0.",
        text=-1.0,
        parse=_within("a number from 0, below 1", lambda momentum: 0 <= momentum < 1),
    )

    def averaging(self, *, robust: bool = False) -> Averaging:
        """Return the settings of averaging. Raises UsageError if options do not go together."""
        from swarmnode.codec.tensors import Codec
        from swarmnode.swarm.records.run import Averaging

        codec, rank = self.average_codec, self.average_rank
        if self.average_keep is not None and codec not in ("topk", "topk2"):
            raise UsageError("--average-keep goes with --average-codec topk or topk2")
        if self.average_every == 1 and (self.outer_lr is not None or self.outer_momentum is not None):
            raise UsageError("--outer-lr and --outer-momentum go with --average-every above 1")
        if self.average_by_line and rank:
            raise UsageError(
                "--average-by-line goes with a codec, and not with --average-rank: factors are of one size"
            )
        if self.average_alternating and not rank:
            raise UsageError("--average-alternating goes with --average-rank: what alternates are factors")
        fine = {"keep": self.average_keep, "outer_lr": self.outer_lr, "outer_momentum": self.outer_momentum}
        given = {name: value for name, value in fine.items() if value is not None}
        return Averaging(
            every=self.average_every,
            codec=Codec[codec.upper()],
            rank=rank,
            by_line=self.average_by_line,
            robust=robust,
            alternating=self.average_alternating,
            **((SPARSE_LOCO if codec == "topk2" else {}) | given),
        )
