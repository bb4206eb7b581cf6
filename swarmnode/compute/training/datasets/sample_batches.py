"""Batches of samples with labels of their own: conversations, pairs and documents, padded or packed into rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from swarmnode.compute.training.datasets.batches import Microbatch, WeighedBatches, check_vocabulary
from swarmnode.data.rows import NO_LABEL, Rows
from swarmnode.data.rules import DataSummary
from swarmnode.swarm.records.run import Run


class SampleBatches(WeighedBatches):
    """Batches of rows. Inputs are (ids_BT int64,), of packed rows also positions_BT int64; labels are labels_BT int64 and the
    microbatch's share of the step's labels."""

    def __init__(self, rows: Rows, vocabulary: int) -> None:
        """Take the rows; `vocabulary` is the model's. Raises UsageError if a token is outside of it."""
        super().__init__()
        check_vocabulary(rows.ids_NT, vocabulary)
        self.content, self._vocabulary = rows, vocabulary
        self.fingerprint = rows.fingerprint
        self._labels_N = (rows.labels_NT != NO_LABEL).sum(axis=1)

    def __repr__(self) -> str:
        return f"<SampleBatches of {len(self._labels_N)} rows, {self.fingerprint.hex()[:12]}>"

    def samples(self, run: Run) -> int:
        """Return the number of rows."""
        return len(self._labels_N)

    def summary(self, run: Run) -> DataSummary:
        """Return the numbers of samples and tokens, and how often the run's steps pass them."""
        content = self.content
        epochs = run.steps * run.batch / self.samples(run)
        rows = self.samples(run)
        return DataSummary(content.samples, content.tokens, rows, content.cut, epochs, content.left_out, self.notes)

    def tokens(self, step: int, run: Run) -> int:
        """Return the number of tokens in the rows of a step, without padding."""
        numbers = [number for one in range(run.microbatches) for number in self._numbers(step, one, run)]
        return int(self.content.held_N2[numbers, 1].sum())

    def split(self, share: float, run: Run) -> tuple[SampleBatches, SampleBatches]:
        """Return the first rows, and the last ones, which are that `share` of all. Raises UsageError if there are too few."""
        trained, held_out = self.content.split(share)
        return SampleBatches(trained, self._vocabulary), SampleBatches(held_out, self._vocabulary)

    def rows(self, numbers: list[int], run: Run) -> Microbatch:
        """Return the rows with these `numbers` as one microbatch, its labels without a share."""
        content = self.content
        given = [_tensor(content.ids_NT, numbers)]
        if content.is_packed:
            given.append(_tensor(content.positions_NT, numbers))
            if run.known_recipe.watches_routers:  # routers do not learn from padding: each position of it is 0
                given[1] *= torch.arange(run.sequence) < torch.from_numpy(content.held_N2[numbers, 1:])
        return Microbatch(tuple(given), (_tensor(content.labels_NT, numbers),))

    def in_order(self, number: int, run: Run) -> Microbatch:
        """Return microbatch `number` of the rows in their own order, with its share of the labels of all held-out microbatches."""
        size = run.microbatch
        numbers_MB = [[*range(one * size, (one + 1) * size)] for one in range(run.evaluations_at(run.steps))]
        made = self.rows(numbers_MB[number], run)
        return made._replace(labels=(*made.labels, self._shares(numbers_MB)[number]))

    def _shares(self, numbers_MB: list[list[int]]) -> Tensor:
        """Return the labels of each microbatch over the mean of all."""
        counts_M = self._labels_N[numbers_MB].sum(axis=1)
        return torch.tensor(counts_M / counts_M.mean(), dtype=torch.float32).unsqueeze(1)


def _tensor(values_NT: np.ndarray, numbers: list[int]) -> Tensor:
    return torch.from_numpy(values_NT[numbers].astype(np.int64))
