"""Projection: a short sketch of a long vector, by which lengths and angles are kept about as they are.

Each element goes, with a sign of its own, into one of K places (as in a count sketch). The signs are this peer's secret: who
does not know them cannot choose a vector of which nothing is seen.

Shape letters: M elements of a part, K of a sketch.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from swarmnode.compute.training.averaging.parts import ALIGNMENT, LARGEST_PART

SKETCHED = 1024
SPREAD = 40_503  # odd: parts take their signs from different places


class Projection:
    """Of parts of one vector after another."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __repr__(self) -> str:
        return f"Projection(to {SKETCHED} elements)"

    @functools.cached_property
    def _signs_M(self) -> Tensor:  # drawn when they are needed: only where averaging is robust
        generator = torch.Generator().manual_seed(self._seed)
        return torch.randint(0, 2, (2 * LARGEST_PART,), generator=generator, dtype=torch.int8) * 2 - 1

    def sketch(self, start: int, values_M: Tensor) -> Tensor:
        """sketch_K, on the CPU, of the part of the vector that begins at element `start`."""
        first = start // ALIGNMENT * SPREAD % LARGEST_PART
        signed_M = values_M * self._signs_M[first : first + len(values_M)].to(values_M.device)
        padded_M = torch.nn.functional.pad(signed_M, (0, -len(signed_M) % SKETCHED))
        return padded_M.view(-1, SKETCHED).sum(0).cpu()
