"""Both ends of a model, held by the client: token ids go in and logits come out here, the swarm sees hidden states only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, WANT_NOTHING, RunnerConfig, StageRunner, StepInput


class Ends:
    """The embedding and the head, each a span of one unit. They keep no cache, only positions."""

    def __init__(self, embedding: StageRunner, head: StageRunner) -> None:
        self._embedding = embedding
        self._head = head
        self.hidden_size = embedding.span.hidden_size  # of the states that come in between

    def __repr__(self) -> str:
        return f"<Ends {self._embedding!r} {self._head!r}>"

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> Ends:
        """Load unit 0 and the last unit. Raises CheckpointError."""
        units = checkpoint.units
        nothing = RunnerConfig(cache_bytes=0)
        head = load_span(checkpoint, units - 1, units)
        head.packings.at_once.run()
        return cls(StageRunner(load_span(checkpoint, 0, 1), nothing), StageRunner(head, nothing))

    def open(self, session: Hashable, rows: int, max_length: int, padding: Sequence[int]) -> None:
        """Begin a session of so many rows."""
        for runner in (self._embedding, self._head):
            runner.open(session, rows=rows, max_length=max_length, padding=padding)

    def close(self, session: Hashable) -> None:
        """End a session."""
        for runner in (self._embedding, self._head):
            runner.close(session)

    def truncate(self, session: Hashable, length: int) -> None:
        """Forget the positions from `length` on."""
        for runner in (self._embedding, self._head):
            runner.truncate(session, length)

    def embed(self, session: Hashable, ids_BT: Tensor, reorder: tuple[int, ...]) -> Tensor:
        """hidden_BTH of the next token ids."""
        return self._embedding.run([StepInput(session, ids_BT, want=WANT_NOTHING, reorder=reorder)])[0].output

    def logits(self, session: Hashable, hidden_BTH: Tensor) -> Tensor:
        """logits_BTV (float32) of hidden states that came out of the last layer."""
        work = StepInput(session, hidden_BTH.to(self._head.span.dtype), want=WANT_ALL)
        return self._head.run([work])[0].output.to(torch.float32)
