"""Parts of a flat vector: who adds up which, and the sum. See `roles/training/reducer.py` for the conversation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

ALIGNMENT = 64  # elements: the codecs' groups do not cross parts


def cut(length: int, members: int) -> list[slice]:
    """As many parts of [0, length) as members, nearly equal, on the codecs' groups."""
    step = -(-length // members)
    step += -step % ALIGNMENT
    return [slice(min(place * step, length), min((place + 1) * step, length)) for place in range(members)]


def reduce_part(received: Sequence[Tensor]) -> Tensor:
    """The sum of what the members sent, in their order, so that it comes out the same whoever adds."""
    total_N = received[0].clone()
    for part_N in received[1:]:
        total_N += part_N
    return total_N
