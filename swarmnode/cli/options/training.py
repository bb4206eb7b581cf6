"""How replicas that train come to one gradient, for `train` and `simulate`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnode.cli.options.option import option
from swarmnode.config import COMPRESSIONS
from swarmnode.errors import UsageError

if TYPE_CHECKING:
    from swarmnode.swarm.records.run import Averaging, Compression

CODECS = ("none", "bf16", "fp16", "int8", "int4", "topk", "topk2")
SPARSE_LOCO = {"keep": 0.02, "outer_momentum": 0.0}  # arXiv 2508.15706: error feedback takes the place of momentum


def _ratio(ratio: float, flag: str) -> float:
    from swarmnode.swarm.records.run import MAX_RATIO

    if not (math.isfinite(ratio) and 1 <= ratio <= MAX_RATIO):
        raise UsageError(f"{flag} {ratio:g}: it is a number from 1 to {MAX_RATIO:.0f}")
    return ratio


@dataclass(frozen=True)
class CompressionOptions:
    """Options of compression. A `topk_ratio` of None is not given."""

    compress: str = option(
        "auto",
        "What goes from stage to stage: auto as each node sees fit; adatopk the fewer, the slower the link.",
        choices=COMPRESSIONS,
    )
    topk_ratio: float | None = option(
        None,
        "Of topk, adatopk, slowest: one of R elements is sent, on the slowest link; default: 100.",
        text=0.0,
        metavar="R",
        parse=_ratio,
    )
    topk_feedback: bool = option(False, "Add what top-k left out to what is sent next.")

    def compression(self) -> Compression:
        """Return the settings of compression. Raises UsageError if options do not go together."""
        from swarmnode.plan.compression import SPARSE_RULES
        from swarmnode.swarm.records.run import Compression

        if self.compress not in SPARSE_RULES and (self.topk_ratio or self.topk_feedback):
            raise UsageError(f"--topk-ratio and --topk-feedback go with --compress {', '.join(SPARSE_RULES)}")
        if self.topk_ratio is None:
            return Compression(self.compress, feedback=self.topk_feedback)
        return Compression(self.compress, self.topk_ratio, self.topk_feedback)


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
