"""Weights of microbatches by their labels: the last of the labels of a run that weighs so."""

from __future__ import annotations

import torch

from swarmnode.compute.training.segment import Values
from swarmnode.errors import ProtocolError
from swarmnode.swarm.records.run import MAX_MICROBATCHES

EVEN = torch.ones(())


def apart(labels: Values) -> tuple[Values, float]:
    """Return the labels without the weight at their end, and the weight. Raises ProtocolError if it is none."""
    *others, weight = labels or (torch.empty(0),)
    if weight.dtype != torch.float32 or weight.dim() or not 0 <= (value := float(weight)) <= MAX_MICROBATCHES:
        raise ProtocolError("the labels do not end with the weight of their microbatch")
    return tuple(others), value
