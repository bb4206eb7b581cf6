"""Shares of microbatches in a step's means over labels: the last of the labels of a run that weighs so."""

from __future__ import annotations

import torch

from swarmnode.compute.training.segment import Shares, Values
from swarmnode.errors import ProtocolError
from swarmnode.swarm.records.run import MAX_MICROBATCHES


def apart(labels: Values, means: int) -> tuple[Values, Shares]:
    """Return the labels without the shares at their end, and the shares of so many means. Raises ProtocolError if they are none."""
    *others, last = labels or (torch.empty(0),)
    if last.dtype == torch.float32 and last.shape == (means,):
        shares = tuple(last.tolist())
        if all(0 <= share <= MAX_MICROBATCHES for share in shares):
            return tuple(others), shares
    raise ProtocolError("the labels do not end with the shares of their microbatch")
