"""Options of a training's data: what it is, which of its tokens count, and how often it is passed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.errors import UsageError
from swarmnode.terminal.option import option

if TYPE_CHECKING:
    from swarmnode.data.rules import DataRules

LOSSES = ("answers", "all")


@dataclass(frozen=True)
class DataOptions:
    """Options of the data that a training reads."""

    data: Path = option(
        ...,
        "Text or a folder of it; .jsonl (also .gz, .bz2, .xz, .zst), .parquet or a folder of datasets with messages, "
        "prompt and completion, or text; .npz of token ids, or of a module's inputs.",
        typed=Path,
        metavar="PATH",
    )
    epochs: float = option(0.0, "Passes over the data, instead of --steps.", show_default=False)
    loss: str = option(
        "answers", "Tokens of conversations and completions that the model learns: its answers, or all.", choices=LOSSES
    )
    pack: bool = option(True, "Put several conversations into one row; none of them sees another.", "--pack/--no-pack")

    def rules(self, steps: int) -> DataRules:
        """Return the rules of the data. Raises UsageError unless either `steps` or epochs are given."""
        from swarmnode.data.rules import DataRules, check_rules
        from swarmnode.data.samples import LearntTokens

        if bool(steps) == bool(self.epochs):
            raise UsageError("how long shall it train? Give either --steps or --epochs")
        rules = DataRules(LearntTokens(self.loss), self.pack, self.epochs)
        check_rules(rules)
        return rules
