"""A node that also has a proposer which knows the text, for drafts.py: `python oracle_node.py python -m swarmnode.cli.main run …`.

Clients ask for it by `drafts="auto"`. The texts are lists of token ids in the JSON file that $SWARMNODE_BENCH_TEXTS names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEXTS = "SWARMNODE_BENCH_TEXTS"
NAME = "oracle"


class Oracle:
    """Drafter that proposes what follows in the known text that begins like the session's text."""

    name = NAME

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._known = [list(text) for text in texts]
        self._text: list[int] = []

    def push(self, ids: Sequence[int]) -> None:
        """Append accepted tokens to the text; the prompt comes first."""
        self._text += ids
        self._known = [text for text in self._known if text[: len(self._text)] == self._text]

    def cut(self, length: int) -> None:
        """Forget all but the first `length` accepted tokens."""
        del self._text[length:]

    def propose(self, guessed: Sequence[int], count: int) -> list[int]:
        """Return the `count` tokens that will follow; fewer at the end of the text."""
        begin = len(self._text) + len(guessed)
        return self._known[0][begin : begin + count] if self._known else []


def add_oracle() -> None:
    """Let this process's sessions use the oracle if their clients ask for it."""
    from swarmnode.codec.messages import ANY_DRAFTS
    from swarmnode.plan.serving.draft_budget import MeasuredBudget
    from swarmnode.serving.drafting.proposers import Proposers

    usual = Proposers.__call__

    def with_oracle(self: Proposers, opened: Any) -> Any:
        if opened.proposer != ANY_DRAFTS:
            return usual(self, opened)
        _, budget = usual(self, opened)
        assert isinstance(budget, MeasuredBudget)
        known = budget.proposer(NAME)
        known.acceptance, known.allowed = 1.0, opened.drafts
        return Oracle(json.loads(Path(os.environ[TEXTS]).read_text())), budget

    Proposers.__call__ = with_oracle  # type: ignore[method-assign]


if __name__ == "__main__":
    add_oracle()
    sys.argv = ["swarmnode", *sys.argv[4:]]  # behind `python -m swarmnode.cli.main`
    from swarmnode.cli.main import main

    main()
