"""Recomputation: a microbatch of the present step, as another replica computed it, without counting it.

It goes layer by layer, so that it needs only the memory of one layer's graph and gradients, and of the values at the boundaries
between layers.

Shape letters: N elements of a block's gradient, S of a gradient sketch.

Gradient sketches: long gradients in few numbers, so that they can be compared without being sent or kept.

They have three uses, with the same signs (`compute/serving/sketch.py`). First, the growth of the sums of gradients by a
microbatch: the vector is cut into tiles, and each is summed with signs that follow from the step. So sketches add up as gradients
do, and a microbatch's part is the sketch after it less the one before: one read of the sums each, and no copy of them. Second,
another member's contribution to a sum of gradients, in the same tiles: the sketches of its microbatches, which it has signed, must
add up to it. Third, the relation of members to one another in the parts that one of them adds up: a count sketch, whose signs are
that member's secret.

Shape letters: N elements of a block's gradient, M of a part, T of a tile, S tiles of a block, K of a count sketch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from swarmnode.codec.audit_messages import SEED_BYTES, SKETCH_VALUES
from swarmnode.compute.serving.sketch import relative, signs
from swarmnode.compute.training.averaging.parts import ALIGNMENT, LARGEST_PART
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.saved_activations import Gradients, SavedPiece, check_finite, check_shapes, leaves
from swarmnode.compute.training.segment import Values

TILES = 256  # of a block at least, if it has as many elements
LARGEST_TILE = 1 << 14
LEAST = 0.1  # of a usual row: some rows of gradients are nothing but rounding
ROUNDED = 1e-5  # of what all microbatches of a step add, which float32 sums round by: tiles of 16,384 lay at 2.4e-6
SKETCHED = 1024
SPREAD = 40_503  # odd: parts take their signs from different places


def step_seed(run: bytes, step: int) -> bytes:
    """Return the seed of all sketches of a step, so that they add up. `run` is the run's id."""
    return hashlib.sha256(run + step.to_bytes(8, "little")).digest()[:SEED_BYTES]


def tile_length(elements: int) -> int:
    """Return the length of the tiles of a block of `elements` values."""
    return min(LARGEST_TILE, max(1, elements // TILES))


def tile_count(elements: int) -> int:
    """Return the number of tiles of a block of `elements` values; the last one may be empty."""
    return elements // tile_length(elements) + 1


@torch.no_grad()
def gradient_sketch(gradient_N: Tensor, seed: bytes) -> Tensor:
    """Return the sketch_S (float32, on the CPU) of a block's gradient."""
    tile = tile_length(len(gradient_N))
    signs_T = signs(seed, LARGEST_TILE)[:tile].to(gradient_N)
    whole = len(gradient_N) - len(gradient_N) % tile
    rest_N = gradient_N[whole:]
    return torch.cat([gradient_N[:whole].view(-1, tile) @ signs_T, (rest_N @ signs_T[: len(rest_N)]).view(1)]).cpu()


class BlockSketches(dict[int, Tensor]):
    """Sketches of gradients by block of parameters. Sketches of the same block add up."""

    def add(self, block: int, sketch_S: Tensor) -> None:
        """Add `sketch_S` to the sketch of the block `block`."""
        self[block] = self[block] + sketch_S if block in self else sketch_S

    def joined(self) -> Tensor:
        """Return all sketches as one vector, in the order of the blocks."""
        return torch.cat([torch.empty(0), *(self[block] for block in sorted(self))])


def in_rows(sketch_S: Tensor) -> Tensor:
    """Return a sketch as sketch_TK, padded with zeros, so that it can be judged like the sketches of states."""
    return pad(sketch_S, (0, -len(sketch_S) % SKETCH_VALUES)).view(-1, SKETCH_VALUES)


def additions_apart(theirs_S: Tensor, ours_S: Tensor, added_S: Tensor) -> list[float]:
    """Return for each row of two sketches of an addition their distance, relative to their lengths, beyond the rounding of
    the sums: they are float32, and as large as all additions of the step together (`added_S`)."""
    theirs_TK, ours_TK, added_TK = (in_rows(one_S).double() for one_S in (theirs_S, ours_S, added_S))
    lengths_T = (theirs_TK.norm(dim=-1) * ours_TK.norm(dim=-1)).sqrt()
    distances_T = (theirs_TK - ours_TK).norm(dim=-1) - ROUNDED * added_TK.norm(dim=-1)
    return relative(distances_T.clamp_min(0), lengths_T, least=LEAST).tolist()


class ContributionSketch:
    """Sketch of one member's contributions to the parts that are added up here.

    `lengths` holds for each block its elements in the vector, and how many of its first elements are gradients. Each owner of parts
    sees a share of the vector, and compares only whole tiles.
    """

    def __init__(self, peer: str, lengths: Mapping[int, tuple[int, int]], seed: bytes) -> None:
        self.peer = peer
        self._lengths = lengths
        self._seed = seed
        self._tiles: dict[
            int, Tensor
        ] = {}  # by block, for each tile: the sum with signs, the squares, the number of elements

    @torch.no_grad()
    def accept(self, blocks: Sequence[int], peer: str, place: slice, values_M: Tensor) -> None:
        """Take in the contribution of `peer` to elements `place` of the vector of these blocks; other members' are ignored."""
        if peer != self.peer:
            return
        start = 0
        for block in blocks:
            length, elements = self._lengths[block]
            first, last = max(place.start, start), min(place.stop, start + elements)
            if first < last:
                self._add(block, first - start, values_M[first - place.start : last - place.start])
            start += length

    def _add(self, block: int, first: int, values_M: Tensor) -> None:
        _, elements = self._lengths[block]
        tile = tile_length(elements)
        edges = (first % tile, -(first + len(values_M)) % tile)
        values_ST, ones_ST = (pad(one_M, edges).view(-1, tile) for one_M in (values_M, torch.ones_like(values_M)))
        sums_S = values_ST @ signs(self._seed, LARGEST_TILE)[:tile].to(values_M)
        found_3S = torch.stack([sums_S, values_ST.square().sum(dim=1), ones_ST.sum(dim=1)])
        tiles_3S = self._tiles.setdefault(block, torch.zeros(3, tile_count(elements)))
        tiles_3S[:, first // tile : first // tile + len(values_ST)] += found_3S.cpu()

    @property
    def blocks(self) -> list[int]:
        """Numbers of the blocks that the member has contributed to, among the parts that this node sums, in order."""
        return sorted(self._tiles)

    def deviations(self, due: Mapping[int, Tensor], *, longer_than: float) -> list[float]:
        """Compare the completely received tiles with `due`: by block the whole sketch_S that they should have.

        Returns for each row its distance, relative to the length of its elements: rounding is proportional to that length, not to
        their sum with signs. Rows that are not `longer_than` this are left out, as they show nothing.
        """
        tiles_3S = torch.cat([torch.empty(3, 0), *(self._whole(block, due[block]) for block in self.blocks)], dim=1)
        came_TK, due_TK, squares_TK = map(in_rows, tiles_3S)
        lengths_T = torch.maximum(squares_TK.sum(dim=-1).sqrt(), due_TK.norm(dim=-1))
        apart_T = relative((came_TK - due_TK).norm(dim=-1), lengths_T, least=LEAST)
        return apart_T[lengths_T > longer_than].tolist()

    def _whole(self, block: int, due_S: Tensor) -> Tensor:
        """Return for the completely received tiles the received sum, the due one, and the squares."""
        _, elements = self._lengths[block]
        sums_S, squares_S, came_S = self._tiles[block]
        sizes_S = torch.full_like(came_S, tile_length(elements))
        sizes_S[-1] = elements % tile_length(elements)
        return torch.stack([sums_S, due_S, squares_S])[:, (came_S == sizes_S) & (sizes_S > 0)]


def count_sketch(start: int, values_M: Tensor, seed: bytes) -> Tensor:
    """Return the sketch_K, on the CPU, of the part of a vector that begins at element `start`.

    It keeps lengths and angles approximately: each element is added, with a sign of its own, to one of K places. Without the
    seed no member can choose a vector that the sketch does not show.
    """
    first = start // ALIGNMENT * SPREAD % LARGEST_PART
    signed_M = values_M * signs(seed, 2 * LARGEST_PART)[first : first + len(values_M)].to(values_M.device)
    return pad(signed_M, (0, -len(values_M) % SKETCHED)).view(-1, SKETCHED).sum(0).cpu()


@dataclass(frozen=True)
class Recomputation:
    """Result of a recomputation: outputs, gradients of the inputs, and sketch_S of the growth of parameters' gradients."""

    outputs: Values
    gradients: Gradients
    sketch_S: Tensor


def recompute(
    learner: DeviceLearners,
    number: int,
    start: int,
    end: int,
    values: Values,
    labels: Values,
    gradients: Gradients,
    seed: bytes,
) -> Recomputation:
    """Compute layers [start, end) on microbatch `number` from `values`, then backwards from the gradients of their outputs.

    At the model's end it goes back from the loss on `labels` instead. Raises ProtocolError if the gradients do not fit, NotFinite.
    """
    boundaries = [values]
    for unit in range(start, end):
        boundaries.append(learner.compute(number, unit, unit + 1, boundaries[-1], labels))
    outputs = boundaries.pop()
    if end == learner.segment.units:
        gradients = (torch.full_like(outputs[0], 1 / learner.run.microbatches),)
    check_shapes(gradients, [output.shape for output in outputs], end)
    check_finite(gradients, end)
    grown = BlockSketches()
    for unit in reversed(range(start, end)):
        flowing, found = _back_through(learner, number, unit, boundaries.pop(), labels, gradients)
        for block, gradient_N in found:
            grown.add(block, gradient_sketch(gradient_N, seed))
        gradients = flowing
    return Recomputation(outputs, gradients, grown.joined())


def _back_through(
    learner: DeviceLearners, number: int, unit: int, values: Values, labels: Values, gradients: Gradients
) -> tuple[Gradients, Iterator[tuple[int, Tensor]]]:
    """Return the gradients of the values that entered a layer, and by block the gradient_N of its parameters."""
    inputs = leaves(values, unit)
    blocks = learner.parameters(unit, unit + 1)
    wanted = [value for value in inputs if value.requires_grad]
    wanted += [parameter for parameters in blocks.values() for parameter in parameters]
    found = iter(learner.gradients(number, SavedPiece(unit, unit + 1, inputs, None), gradients, wanted, labels))
    flowing = tuple(next(found) if value.requires_grad else None for value in inputs)
    return flowing, ((block, _flat(parameters, found)) for block, parameters in blocks.items())


def _flat(parameters: Sequence[Tensor], results: Iterator[Tensor | None]) -> Tensor:
    """Return the gradients of one block's `parameters` as one vector; zeros for a parameter without gradient."""
    gradients = (
        torch.zeros_like(parameter) if (gradient := next(results)) is None else gradient for parameter in parameters
    )
    return torch.cat([gradient.reshape(-1) for gradient in gradients])
