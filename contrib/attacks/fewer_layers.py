"""A peer leaves out its last layer, to finish sooner."""

from __future__ import annotations

import torch
from attack import Outcome, main
from liar import compute_with, first_units, found_out

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan

VIRTUAL, FAST = True, False


def without_the_last_layer(model: Checkpoint) -> ModelSpan:
    """Load the first stage with a last layer that adds nothing, because the weights of its two output products are zero."""
    span = first_units(model)
    last = list(span.stack.children())[-1]
    for product in (last.self_attn.o_proj, last.mlp.down_proj):
        product.weight.data = torch.zeros_like(product.weight)
    return span


async def attack() -> Outcome:
    return await found_out(lambda member, model: compute_with(member, without_the_last_layer(model)))


main(__name__, attack, virtual=VIRTUAL)
