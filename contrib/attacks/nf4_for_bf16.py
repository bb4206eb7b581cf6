"""A peer announces bf16 and computes with weights of 4 bits, to hold more units than it has memory for."""

from __future__ import annotations

import torch
from attack import Outcome, main
from liar import compute_with, first_units, found_out

VIRTUAL, FAST = True, False


async def attack() -> Outcome:
    return await found_out(
        lambda member, model: compute_with(member, first_units(model, torch.bfloat16, "nf4")), dtype="bfloat16"
    )


main(__name__, attack, virtual=VIRTUAL)
