"""Replicas that agree within one process: what reducers do over links, told without them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.compress.codecs import Buffer
from swarmnode.compute.training.averaging.gradient_compressor import Exchange, GradientCompressor, Round
from swarmnode.compute.training.averaging.parts import FlatVector, Forms, cut
from swarmnode.compute.training.averaging.robust_aggregation import CentredClipping


def agree(
    gradient_compressors: Sequence[GradientCompressor],
    locals_N: Sequence[Tensor],
    weights: Sequence[float],
    clippings: Sequence[CentredClipping | None] = (),
    forms: Sequence[Forms | None] = (),
    *,
    warm_start: bool = False,
) -> tuple[list[Tensor], int]:
    """Run one attempt of the members' exchanges; what each of them ends with, and the bytes that crossed between them.

    A member of weight 0 only listens. `clippings`: one for each member, where the sum is to be robust; `forms`: likewise, where
    they do not send alike; `warm_start`: see `Exchange`.
    """
    totals = [torch.empty_like(local_N) for local_N in locals_N]
    nothing = [None] * len(weights)
    runs = [
        gradient_compressor.run(
            Exchange(FlatVector([local_N]), FlatVector([total_N]), weight, clipping, form, warm_start)
        )
        for gradient_compressor, local_N, total_N, weight, clipping, form in zip(
            gradient_compressors, locals_N, totals, weights, clippings or nothing, forms or nothing, strict=True
        )
    ]
    return totals, sum(_sum(rounds) for rounds in zip(*runs, strict=True))


def _sum(rounds: Sequence[Round]) -> int:
    """Settle all parts of one round; the bytes that crossed."""
    contributors = [round_ for round_ in rounds if round_.weight]
    crossed_bytes = 0
    for number, part, _ in cut(len(rounds[0]), [1] * len(contributors)):
        owner = contributors[number]
        offers = [round_.offer(part) for round_ in contributors]
        heard = [owner.accept(part, of.weight, *offer) for of, offer in zip(contributors, offers, strict=True)]
        agreed = owner.settle(part, heard)
        crossed_bytes += sum(
            _length(offer[1]) for offer, sender in zip(offers, contributors, strict=True) if sender is not owner
        )
        crossed_bytes += _length(agreed[1]) * (len(rounds) - 1)
        for round_ in rounds:
            round_.write_settled(part, *agreed)
    return crossed_bytes


def _length(payload: Buffer) -> int:
    return memoryview(payload).nbytes
