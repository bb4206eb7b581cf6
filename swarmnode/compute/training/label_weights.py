"""Shares of microbatches in a step's means over labels: the last labels tensor in a run with `weighs_labels`."""

from __future__ import annotations

import torch

from swarmnode.compute.training.segment import Shares, Values
from swarmnode.errors import ProtocolError
from swarmnode.swarm.records.run import MAX_MICROBATCHES


def apart(labels: Values, means: int) -> tuple[Values, Shares]:
    """Return the labels without the last tensor, and the shares in it, one for each of the `means`.

    Raises ProtocolError if the last tensor does not hold `means` valid shares in float32.
    """
    *others, last = labels or (torch.empty(0),)
    if last.dtype == torch.float32 and last.shape == (means,):
        shares = tuple(last.tolist())
        if all(0 <= share <= MAX_MICROBATCHES for share in shares):
            return tuple(others), shares
    raise ProtocolError("the labels do not end with the shares of their microbatch")
