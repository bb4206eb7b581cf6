"""A peer computes with other weights than the swarm's, of the same shapes."""

from __future__ import annotations

import torch
from attack import Outcome, main
from liar import compute_with, first_units, found_out

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan

VIRTUAL, FAST = True, False


def another_seeds(model: Checkpoint) -> ModelSpan:
    span, generator = first_units(model), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in span.stack.parameters():
            if weight.dim() == 2:
                weight.data = torch.randn(weight.shape, generator=generator) * weight.std()
    return span


async def attack() -> Outcome:
    return await found_out(lambda member, model: compute_with(member, another_seeds(model)))


main(__name__, attack, virtual=VIRTUAL)
