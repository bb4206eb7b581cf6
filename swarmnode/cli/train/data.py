"""Options of a training's data: what it is, which of its tokens count, and how often it is passed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.errors import UsageError
from swarmnode.terminal.option import option, path_option

if TYPE_CHECKING:
    from swarmnode.data.rules import DataRules

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
        from swarmnode.data.rules import DataRules, check_rules
        from swarmnode.data.samples import LearntTokens

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
