"""What activations travel as between the stages of a swarm that trains, for `train`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnode.cli.options.option import option
from swarmnode.config import COMPRESSIONS
from swarmnode.errors import UsageError

if TYPE_CHECKING:
    from swarmnode.swarm.records.run import Compression


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
        from swarmnode.plan.sparsity import SPARSE_RULES
        from swarmnode.swarm.records.run import Compression

        if self.compress not in SPARSE_RULES and (self.topk_ratio or self.topk_feedback):
            raise UsageError(f"--topk-ratio and --topk-feedback go with --compress {', '.join(SPARSE_RULES)}")
        if self.topk_ratio is None:
            return Compression(self.compress, feedback=self.topk_feedback)
        return Compression(self.compress, self.topk_ratio, self.topk_feedback)
