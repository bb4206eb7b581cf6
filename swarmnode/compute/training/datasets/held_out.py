"""Batches with held-out data: some microbatches of a step are of samples that the model is not trained on."""

from __future__ import annotations

import hashlib

from swarmnode.compute.training.datasets.batches import Batches, Microbatch
from swarmnode.data.rules import DataSummary
from swarmnode.swarm.records.run import Run


class WithHeldOut(Batches):
    """Batches of `trained` data, whose numbers from `run.microbatches` on are of the data `held_out`, the same in each step."""

    def __init__(self, trained: Batches, held_out: Batches) -> None:
        self._trained, self._held_out = trained, held_out
        self.fingerprint = hashlib.sha256(b"held out" + trained.fingerprint + held_out.fingerprint).digest()

    def __repr__(self) -> str:
        return f"WithHeldOut({self._trained!r}, {self._held_out!r})"

    def samples(self, run: Run) -> int:
        return self._trained.samples(run)

    def summary(self, run: Run) -> DataSummary:
        """Return the numbers of the data that are trained on."""
        return self._trained.summary(run)

    def tokens(self, step: int, run: Run) -> int:
        """Return the number of tokens that a step trains on; held-out ones do not count."""
        return self._trained.tokens(step, run)

    def rows(self, numbers: list[int], run: Run) -> Microbatch:
        return self._trained.rows(numbers, run)

    def microbatch(self, step: int, number: int, run: Run) -> Microbatch:
        """Return microbatch `number` of step `step`. A held-out one holds the next rows in the order of the file."""
        if number < run.microbatches:
            return self._trained.microbatch(step, number, run)
        return self._held_out.in_order(number - run.microbatches, run)
