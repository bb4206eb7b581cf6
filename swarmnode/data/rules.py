"""Rules that turn data into samples, beside the settings of a run: tokens that count, packing, epochs, held-out data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarmnode.counting import counted
from swarmnode.data.samples import LearntTokens
from swarmnode.errors import UsageError


@dataclass(frozen=True)
class DataRules:
    """Rules of a training's data.

    `loss`: tokens of conversations and pairs that count. `packs`: several samples share a row if the model can train so. `epochs`:
    passes over the data, which give the number of steps; 0 if the steps are given. `held_out`: data to evaluate on, or
    `held_out_share`: the share of the data's rows that is kept back for it; every `evaluate_every` steps (0: never). `shown`:
    number of samples that are shown at the start. `ends_answers`: the model's stop token is put behind the last answer of a
    conversation if its template writes none.
    """

    loss: LearntTokens = LearntTokens.ANSWERS
    packs: bool = True
    epochs: float = 0.0
    held_out: Path | None = None
    held_out_share: float = 0.0
    evaluate_every: int = 0
    shown: int = 1
    ends_answers: bool = False


@dataclass(frozen=True)
class DataSummary:
    """Summary of the data of a run: its samples, their tokens (0 for arrays), the rows that they fill, the samples that were cut
    to a row's length, and the passes over them in the run's steps. `left_out` counts samples without a label within a row, which
    are not among them. `notes` are sentences about the data, and samples to show."""

    samples: int
    tokens: int
    rows: int
    cut: int
    epochs: float
    left_out: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        packed = f" in {counted(self.rows, 'row')}" if self.rows != self.samples else ""
        cut = f", {self.cut:,} of them cut to --sequence tokens" if self.cut else ""
        tokens = f", {self.tokens:,} tokens" if self.tokens else ""
        gone = f"; {self.left_out:,} left out: no label within --sequence tokens" if self.left_out else ""
        return f"{counted(self.samples, 'sample')}{packed}{cut}{tokens}; {self.epochs:.3g} epochs{gone}"


def check_rules(rules: DataRules) -> None:
    """Raise UsageError if the rules are not valid."""
    if not 0 <= rules.epochs <= 1e6:
        raise UsageError(f"--epochs {rules.epochs:g}: give a number above 0, up to 1,000,000")
    sources = bool(rules.held_out) + bool(rules.held_out_share)
    if sources > 1 or bool(sources) != bool(rules.evaluate_every):
        raise UsageError("to evaluate, give --eval-every and either --eval-data or --eval-share")
    if not 0 <= rules.held_out_share < 1:
        raise UsageError(f"--eval-share {rules.held_out_share:g}: give a share above 0, below 1")


def steps_of(epochs: float, rows: int, batch: int) -> int:
    """Return the fewest steps of `batch` rows that pass all `rows` `epochs` times."""
    return max(1, -int(-epochs * rows // batch))
