"""Options of training: averaging between swarms' replicas, and the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.config import COMPRESSIONS
from swarmnode.errors import UsageError
from swarmnode.terminal.option import option, path_option

if TYPE_CHECKING:
    from swarmnode.data.samples import DataRules
    from swarmnode.swarm.records.run import Averaging, Compression


CODECS = ("none", "bf16", "fp16", "int8", "int4", "int2", "topk", "topk2")
SPARSE_LOCO = {"keep": 0.02, "outer_momentum": 0.0}  # arXiv 2508.15706: error feedback takes the place of momentum


def _ratio(ratio: float, flag: str) -> float:
    from swarmnode.swarm.records.run import MAX_RATIO

    if not (math.isfinite(ratio) and 1 <= ratio <= MAX_RATIO):
        raise UsageError(f"{flag} {ratio:g}: give a number from 1 to {MAX_RATIO:.0f}")
    return ratio


@dataclass(frozen=True)
class CompressionOptions:
    """Options of compression. A `topk_ratio` of None is not given."""

    compress: str = option(
        "auto",
        "How data between stages is encoded: auto lets each machine choose; adatopk sends less on slower links.",
        choices=COMPRESSIONS,
    )
    topk_ratio: float | None = option(
        None,
        "With topk, adatopk, slowest: send one of R elements on the slowest link; default: 100.",
        text=0.0,
        metavar="R",
        parse=_ratio,
    )
    topk_feedback: bool = option(False, "Add the elements that top-k left out to the next data sent.")

    def compression(self) -> Compression:
        """Return the settings of compression. Raises UsageError if options do not go together."""
        from swarmnode.plan.compression import SPARSE_RULES
        from swarmnode.swarm.records.run import Compression

        if self.compress not in SPARSE_RULES and (self.topk_ratio or self.topk_feedback):
            raise UsageError(f"--topk-ratio and --topk-feedback need --compress {', '.join(SPARSE_RULES)}")
        if self.topk_ratio is None:
            return Compression(self.compress, feedback=self.topk_feedback)
        return Compression(self.compress, self.topk_ratio, self.topk_feedback)


def _within(bounds: str, is_sound: Callable[[float], bool]) -> Callable[[float, str], float]:
    def check(value: float, flag: str) -> float:
        if not is_sound(value):
            raise UsageError(f"{flag} {value:g}: give {bounds}")
        return value

    return check


@dataclass(frozen=True)
class AveragingOptions:
    """Options for averaging between replicas. None means that the option was not given."""

    average_every: int = option(1, "Steps between two averagings of replicas; above 1 works as DiLoCo does.", min=1)
    average_codec: str = option("none", "Codec of averaging; topk2 is SparseLoCo's, int2 MuLoCo's.", choices=CODECS)
    average_keep: float | None = option(
        None,
        "With topk, topk2: share of the elements to send; default: 0.05, with topk2 0.02.",
        text=0.0,
        parse=_within("a share above 0, up to 1", lambda share: 0 < share <= 1),
    )
    average_rank: int = option(0, "Above 0: use PowerSGD of this rank.", min=0, max=1024)
    average_alternating: bool = option(
        False, "With --average-rank: send the two factors in turns, as ACP-SGD does, for half of the bytes."
    )
    average_by_line: bool = option(
        False,
        "Let replicas on slow lines send less: by a stronger codec than --average-codec, or fewer elements of topk, topk2.",
    )
    outer_lr: float | None = option(
        None,
        "With --average-every: learning rate of the outer optimiser; default: 1.",
        text=-1.0,
        parse=_within("a number above 0, up to 10", lambda rate: 0 < rate <= 10),
    )
    outer_momentum: float | None = option(
        None,
        "With --average-every: Nesterov momentum of the outer optimiser; default: 0.5, with topk2 0.",
        text=-1.0,
        parse=_within("a number from 0, below 1", lambda momentum: 0 <= momentum < 1),
    )

    def averaging(self, *, robust: bool = False) -> Averaging:
        """Return the settings of averaging. Raises UsageError if options do not go together."""
        from swarmnode.codec.tensors import Codec
        from swarmnode.swarm.records.run import Averaging

        codec, rank = self.average_codec, self.average_rank
        if self.average_keep is not None and codec not in ("topk", "topk2"):
            raise UsageError("--average-keep needs --average-codec topk or topk2")
        if self.average_every == 1 and (self.outer_lr is not None or self.outer_momentum is not None):
            raise UsageError("--outer-lr and --outer-momentum need --average-every above 1")
        if self.average_by_line and rank:
            raise UsageError(
                "--average-by-line works with a codec, not with --average-rank, whose factors all have one size"
            )
        if self.average_alternating and not rank:
            raise UsageError("--average-alternating needs --average-rank, whose factors alternate")
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


LOSSES = ("answers", "all")


@dataclass(frozen=True)
class DataOptions:
    """Options of the data that a training reads."""

    data: Path | None = path_option(
        "Text, or a folder of it; records as JSON lines, a JSON list, CSV, Parquet or a folder of datasets, with messages, "
        "prompt and completion, or text; .npz of token ids, or of a module's inputs.",
        metavar="PATH",
    )
    epochs: float = option(0.0, "Passes over the data, instead of --steps.", show_default=False)
    loss: str = option(
        "answers", "Tokens of conversations and completions that the model learns: its answers, or all.", choices=LOSSES
    )
    pack: bool = option(True, "Put several conversations into one row; none of them sees another.", "--pack/--no-pack")

    show: int = option(1, "Samples to show at the start, as the model sees them.", min=0)
    end_answers: bool = option(
        False, "Put the stop token behind the last answer of a conversation if its template does not."
    )

    eval_data: Path | None = path_option("Held-out data to evaluate on, of the same kind.", metavar="PATH")
    eval_share: float = option(0.0, "Share of the data to hold out for evaluation, instead of --eval-data.")
    eval_every: int = option(0, "Steps between two evaluations; the last step evaluates, too.", min=0)
    eval_patience: int = option(0, "Stop after this many evaluations without a lower loss; 0: never.", min=0)

    @property
    def path(self) -> Path:
        """Path of the data. Raises UsageError if it is not given."""
        if self.data is None:
            raise UsageError("what shall it learn? Give --data with a file or folder")
        return self.data

    def rules(self, steps: int) -> DataRules:
        """Return the rules of the data. Raises UsageError unless either `steps` or epochs are given."""
        from swarmnode.data.samples import DataRules, LearntTokens, check_rules

        if bool(steps) == bool(self.epochs):
            raise UsageError("how long shall it train? Give either --steps or --epochs")
        if self.eval_patience and not self.eval_every:
            raise UsageError("--eval-patience needs --eval-every")
        rules = DataRules(
            LearntTokens(self.loss),
            self.pack,
            self.epochs,
            self.eval_data,
            self.eval_share,
            self.eval_every,
            self.show,
            self.end_answers,
        )
        check_rules(rules)
        return rules
