"""Learner: forward and backward passes of a segment, gradients counted by microbatch, and the update that ends a step.

A lease is one attempt at one microbatch. Its gradients go straight into the parameters' accumulators (`grad`), and its index is
marked as counted for its layers. For layers that had counted the index before, gradients only flow through. The accumulators stay
until `commit`, so anything between the passes and the commit can be tried again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from swarmnode.codec.body import SHARED
from swarmnode.compute.training.averaging.parts import FlatVector, by_block, split
from swarmnode.compute.training.block import Block
from swarmnode.compute.training.passes import Passes, autocast_dtype
from swarmnode.compute.training.randomness import microbatch_seed
from swarmnode.compute.training.saved_activations import (
    Gradients,
    SavedActivations,
    SavedPiece,
    check_finite,
    check_shapes,
    is_finite,
    leaves,
)
from swarmnode.compute.training.segment import Segment, Shares, Values, apart
from swarmnode.errors import NotFinite
from swarmnode.swarm.records.run import Run


class Learner:
    """Trainer of a segment's layers. With several threads, a caller holds its `lock`.

    `recompute`: keep only the values that enter each layer, and run the layers again, one by one, when gradients come: the memory
    of one layer's graph for a third more of computing. The head keeps its graph, as its backward pass follows at once. `follows`:
    blocks that another learner of this node updates. `alone`: no other device of this process computes at the same time.

    On a card that is fast only in float16, each layer goes back by itself, with scaled gradients. If values overflow forward, or
    back at every scale, the computation is repeated in float32.
    """

    def __init__(
        self,
        segment: Segment,
        run: Run,
        *,
        step: int = 0,
        recompute: bool = False,
        follows: Collection[int] = (),
        alone: bool = True,
    ) -> None:
        self.lock = threading.RLock()
        self.segment = segment
        self.run = run
        self.step = step
        self.recompute = recompute
        segment.aim(run.known_recipe)
        self._autocast_dtype = autocast_dtype(segment.device, wanted=run.autocast)
        self.counted = dict.fromkeys(range(segment.start, segment.end), 0)
        parameters, buffers = segment.parameters(), segment.buffers()
        self._blocks = {
            number: Block(
                number,
                parameters.get(number, {}),
                buffers.get(number, {}),
                run,
                segment.device,
                follows=number in follows,
            )
            for number in sorted({*parameters, *self.counted})
        }
        self._passes = Passes(segment, self._blocks, alone=alone)
        self._saved: dict[int, SavedActivations] = {}

    def __repr__(self) -> str:
        counts = [bin(mask).count("1") for mask in self.counted.values()]
        return (
            f"Learner(step {self.step}, units [{self.segment.start}:{self.segment.end}), {min(counts)} to {max(counts)} "
            f"of {self.run.microbatches} microbatches counted, {self.in_flight} in flight)"
        )

    @property
    def blocks(self) -> tuple[int, ...]:
        """Numbers of the blocks of parameters that this learner trains, in order."""
        return tuple(self._blocks)

    def block(self, number: int) -> Block:
        """Return the block of parameters with this number. Raises KeyError if it is not trained here."""
        return self._blocks[number]

    @property
    def in_flight(self) -> int:
        """Number of forward passes that wait for their gradients."""
        return len(self._saved)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the step's sums of gradients of all blocks."""
        return sum(block.sums_N.nbytes for block in self._blocks.values())

    @property
    def optimizer_bytes(self) -> int:
        """Bytes that the optimiser's memory takes for all blocks, and an update for its temporary tensors."""
        blocks = self._blocks.values()
        working_bytes = max((block.optimizer.working_bytes for block in blocks), default=0)
        return sum(block.optimizer_bytes for block in blocks) + working_bytes

    # -- passes

    def forward(self, lease: int, index: int, start: int, end: int, values: Values, labels: Values = ()) -> Values:
        """Run layers [start, end) on microbatch `index` and keep the pass for `backward`.

        Returns the values at boundary `end`, detached; at the model's end the mean loss, which needs `labels`. Held-out
        microbatches go forward without dropout, and nothing is kept for gradients.
        Raises ValueError for a lease that is in flight, or an index or layers that do not exist, NotFinite for NaN or infinity.
        """
        if lease in self._saved:
            raise ValueError(f"lease {lease} is in flight already")
        if index not in (passes := self.run.passes(self.step)):
            raise ValueError(f"no microbatch {index}: step {self.step} has {passes.start} to {passes.stop - 1}")
        if not self.segment.start <= start < end <= self.segment.end:
            raise ValueError(f"layers [{start}:{end}) are not among [{self.segment.start}:{self.segment.end})")
        saved = self._begin(index, start, end, labels)
        fly = self._evaluate if saved.evaluates else self._fly
        outputs = fly(saved, values)
        is_sound = is_finite(outputs)
        if not is_sound and saved.in_float16:
            saved.autocast_dtype = None
            outputs = fly(saved, values)
            is_sound = is_finite(outputs)
        if not is_sound:
            self._blame(saved, values)
        saved.shapes, saved.entered = tuple(output.shape for output in outputs), len(values)
        self._saved[lease] = saved
        return outputs

    def backward(self, lease: int, grads: Sequence[Tensor | None]) -> Gradients:
        """Take the gradients of the outputs of `forward` (none at the model's end), and return the gradient of each of its inputs.

        Layers that had counted the index before do not count it again. Raises ValueError if the lease is not in flight, or another
        lease was counted meanwhile by some of its layers, ProtocolError for gradients that do not fit, NotFinite for NaN or
        infinity. The lease is over in any case.
        """
        saved = self._saved.pop(lease, None)
        if saved is None:
            raise ValueError(f"lease {lease} is not in flight")
        if saved.evaluates:
            for unit in range(saved.start, saved.end):
                self.counted[unit] |= 1 << saved.index
            return (None,) * saved.entered
        units = [unit for unit in range(saved.start, saved.end) if not self._has(unit, saved.index)]
        if any(
            len({self._has(unit, saved.index) for unit in range(piece.start, piece.end)}) > 1 for piece in saved.pieces
        ):
            raise ValueError(f"microbatch {saved.index} was counted meanwhile for some of the layers")
        if saved.end == self.segment.units:
            grads = (*grads, torch.full(saved.shapes[0], 1 / self.run.microbatches))
        check_shapes(grads, saved.shapes, saved.end)
        if not saved.in_float16:  # in float16 the pass itself finds them, together with overflows
            check_finite(grads, saved.end)
        try:
            inputs = self._fly_back(saved, tuple(grads))
        except RuntimeError:  # out of memory: the accumulators' content is unknown now, so nothing counts
            self.discard()
            raise
        for unit in units:
            self._blocks[unit].count(saved.changes[unit])
            self.counted[unit] |= 1 << saved.index
        return inputs

    def drop(self, lease: int) -> None:
        """Forget a forward pass that will not come back; no error if the lease is unknown."""
        self._saved.pop(lease, None)

    def discard(self) -> None:
        """Forget everything of this step: sums of gradients, counted microbatches, and passes that wait for gradients."""
        self._saved.clear()
        self.counted = dict.fromkeys(self.counted, 0)
        for block in self._blocks.values():
            block.sums_N.zero_()

    def _has(self, unit: int, index: int) -> bool:
        return bool(self.counted[unit] >> index & 1)

    def _begin(self, index: int, start: int, end: int, labels: Values) -> SavedActivations:
        """Return a pass with no layer computed yet. Raises ProtocolError if the labels lack valid shares."""
        seed = microbatch_seed(self.run.seed, self.step, index)
        shares: Shares = ()
        if self.run.weighs_labels and end == self.segment.units:
            labels, shares = apart(labels, self.segment.means)
        evaluates = index >= self.run.microbatches
        return SavedActivations(
            index, start, end, labels, seed, self._autocast_dtype, shares=shares, evaluates=evaluates
        )

    def _fly(self, saved: SavedActivations, values: Values) -> Values:
        """Run the forward pass piece by piece and return its outputs."""
        saved.pieces.clear()
        by_unit = self.recompute or saved.in_float16
        cuts = range(saved.start, saved.end + 1) if by_unit else self._cuts(saved.index, saved.start, saved.end)
        for start, end in pairwise(cuts):
            inputs = leaves(values, start)
            keep = not self.recompute or end == self.segment.units
            with torch.set_grad_enabled(keep):
                outputs, changes = self._passes.compute(saved, start, end, inputs)
            saved.pieces.append(SavedPiece(start, end, inputs, outputs if keep else None))
            saved.changes.update(changes)
            values = tuple(output.detach() for output in outputs)
        return values

    @torch.no_grad()
    def _evaluate(self, saved: SavedActivations, values: Values) -> Values:
        """Run the forward pass of a held-out microbatch and return its outputs."""
        return self._passes.compute(saved, saved.start, saved.end, values)[0]

    def _cuts(self, index: int, start: int, end: int) -> list[int]:
        """Return the bounds of pieces: cuts between layers that have counted a microbatch and layers that have not.

        Only the graph of the latter accumulates.
        """
        inside = range(start + 1, end)
        return [start, *(unit for unit in inside if self._has(unit - 1, index) != self._has(unit, index)), end]

    def _fly_back(self, saved: SavedActivations, grads: Gradients) -> Gradients:
        """Take the gradients back through the pieces in reverse order. Each piece is forgotten when it is done."""
        while saved.pieces:
            piece = saved.pieces.pop()
            if saved.in_float16 or self._has(piece.start, saved.index):
                grads = self._flow_back(saved, piece, grads)
            else:
                grads = self._passes.accumulate(saved, piece, grads)
            del piece
        return grads

    def _flow_back(self, saved: SavedActivations, piece: SavedPiece, grads: Gradients) -> Gradients:
        """Return a piece's input gradients, without accumulating in the graph.

        Parameters of a piece that was counted before get nothing; the others' gradients are added after a check. The function ends
        before the next piece begins, so that the gradients of two pieces are never in memory together.
        """
        inputs = [value for value in piece.inputs if value.requires_grad]
        counted = self._has(piece.start, saved.index)
        blocks = {} if counted else self.parameters(piece.start, piece.end)
        parameters = [parameter for block in blocks.values() for parameter in block]
        found = self._passes.gradients(saved, piece, grads, [*inputs, *parameters])
        for parameter, gradient in zip(parameters, found[len(inputs) :], strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad += gradient
        flowing = iter(found)
        return tuple(next(flowing) if value.requires_grad else None for value in piece.inputs)

    @torch.no_grad()
    def _blame(self, saved: SavedActivations, values: Values) -> None:
        """Run the pass again layer by layer, and raise NotFinite for the first layer at fault."""
        if not is_finite(values):
            raise NotFinite(
                "NaN or infinity came in at the boundary before "
                f"layer {saved.start}; lower --lr or --clip, or check the data",
                unit=saved.start,
            )
        for unit in range(saved.start, saved.end):
            values, _ = self._passes.compute(saved, unit, unit + 1, values)
            if not is_finite(values) or unit == saved.end - 1:
                what = "the loss is" if unit == self.segment.units - 1 else "its output is"
                raise NotFinite(
                    f"layer {unit}, step {self.step}: {what} NaN or infinite; lower --lr or --clip, or check the data",
                    unit=unit,
                )

    # -- what others may check

    def compute(self, index: int, start: int, end: int, inputs: Values, labels: Values = ()) -> Values:
        """Return the outputs of layers for a microbatch, without counting or keeping anything."""
        about = self._begin(index, start, end, labels)
        with torch.no_grad():
            outputs, _ = self._passes.compute(about, start, end, inputs)
            if about.in_float16 and not is_finite(outputs):
                outputs, _ = self._passes.compute(replace(about, autocast_dtype=None), start, end, inputs)
        return outputs

    def gradients(
        self, index: int, piece: SavedPiece, grads: Gradients, wanted: Sequence[Tensor], labels: Values = ()
    ) -> list[Tensor | None]:
        """Return the gradients of `wanted`, inputs and parameters of a piece that a microbatch went through, without counting.

        None for tensors without a gradient.
        """
        about = self._begin(index, piece.start, piece.end, labels)
        return self._passes.gradients(about, piece, grads, wanted)

    def has_counted(self, index: int, start: int, end: int) -> bool:
        """Return whether any of layers [start, end) has counted microbatch `index`."""
        return any(self._has(unit, index) for unit in range(start, end))

    def parameters(self, start: int, end: int) -> dict[int, list[Tensor]]:
        """Return the parameters of layers [start, end) by block number. With the first or last layer come the parameters that
        both share."""
        return {number: list(self._blocks[number].parameters.values()) for number in self._of(start, end)}

    def accumulators(self, start: int, end: int) -> dict[int, Tensor]:
        """Return the step's sums of gradients for layers [start, end) by block; they are the sums themselves, not copies."""
        return {number: self._blocks[number].gradient_N for number in self._of(start, end)}

    def _of(self, start: int, end: int) -> list[int]:
        shares = start == 0 or end == self.segment.units
        return [number for number in self._blocks if start <= number < end or (number == SHARED and shares)]

    # -- the end of a step

    def shapes(self, blocks: Sequence[int]) -> list[torch.Size]:
        """Return the shapes in `gradient`: for each block the parameters, names in order, then the running statistics."""
        return [shape for block in blocks for shape in self._blocks[block].shapes]

    def gradient(self, blocks: Sequence[int]) -> FlatVector:
        """Return the float32 accumulators of these blocks, not copied; see `shapes`.

        Raises KeyError for a block that is not held.
        """
        return FlatVector([self._blocks[block].sums_N for block in blocks])

    def squared_norm(self, blocks: Sequence[int], flat: Tensor | None = None) -> float:
        """Return the squared norm of these blocks' gradients, in the accumulators or in a flat sum.

        Raises NotFinite, naming the layer.
        """
        own = [self._blocks[block].sums_N for block in blocks]
        parts = own if flat is None else split(flat, list(map(len, own)))
        return sum(self._blocks[block].squared_norm(part, self.step) for block, part in zip(blocks, parts, strict=True))

    def count_of(self, block: int) -> int:
        """Return how many microbatches are counted here for a block; for the ends' shared block, by either end."""
        return count_of(block, self.counted, self.segment.units, self.run.microbatches)

    def apart_squared_norm(self, blocks: Sequence[int]) -> float:
        """Return the squared norm of the mean gradient over only the microbatches that are counted here."""
        return sum(self.squared_norm([block]) * self._apart_factor(block) ** 2 for block in blocks)

    def _apart_factor(self, block: int) -> float:
        """Return the factor that turns this replica's share of the step's gradient into the mean over the microbatches that it
        has counted; 0 if it has counted none."""
        count = self.count_of(block)
        return self.run.microbatches / count if count else 0.0

    def pseudo_gradients(self, blocks: Sequence[int]) -> Tensor:
        """Return the pseudo-gradients of these blocks: a flat vector_N, shaped as `gradient`.

        It is their values when the replicas last averaged, minus the present ones.
        """
        pseudo_gradient_N = torch.empty(len(self.gradient(blocks)), device=self.segment.device)
        for block, part in by_block({tuple(blocks): pseudo_gradient_N}, self._size).items():
            self._blocks[block].way(out_N=part)
        return pseudo_gradient_N

    def commit(
        self,
        sums: Mapping[tuple[int, ...], Tensor],
        norm: float,
        *,
        summed: Collection[int] | None = None,
        apart: Collection[int] = (),
        pseudo_gradients: Mapping[tuple[int, ...], Tensor] = MappingProxyType({}),
    ) -> None:
        """Update parameters and go on to the next step. Passes in flight are dropped.

        Blocks that no argument names do not change.

        Args:
            sums: Flat sums that all replicas agree on, by groups of blocks. Other summed blocks use their own accumulators.
            norm: Norm of the gradient, over all layers of the model.
            summed: Blocks whose gradient all replicas agree on; None for all.
            apart: Blocks that use the mean of the microbatches counted here.
            pseudo_gradients: Means of the replicas' pseudo-gradients, by groups of blocks that average now.

        Raises:
            ValueError: A vector has the wrong length; nothing has changed.
            NotFinite: The norm is NaN or infinite.
        """
        if not math.isfinite(norm):
            raise NotFinite(
                f"step {self.step}: the norm of the gradient is {norm}; lower --lr or --clip, or check the data",
                unit=self.segment.start,
            )
        agreed, averaged = by_block(sums, self._size), by_block(pseudo_gradients, self._size)
        for number, block in self._blocks.items():
            if number in averaged:
                block.average(averaged[number])
            if number in apart:
                self._update_apart(number, norm)
            elif summed is None or number in summed:
                if number in agreed:
                    block.sums_N.copy_(agreed[number])
                block.update(self.step, norm)
                block.agree()
        self.discard()
        self.step += 1

    def _update_apart(self, number: int, norm: float) -> None:
        """Update a block with the mean of the microbatches counted here.

        Not in the last step, so that all replicas end with their average.
        """
        if self.count_of(number) and self.step + 1 < self.run.steps:
            block = self._blocks[number]
            block.sums_N.mul_(self._apart_factor(number))
            block.update(self.step, norm)

    def _size(self, block: int) -> int:
        return len(self._blocks[block].sums_N)

    # -- state

    def state(self, block: int) -> dict[str, Tensor]:
        """Return the training state of a block (parameters, buffers, the optimiser's memory) by name: references, not copies."""
        return self._blocks[block].state()

    def load(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Load a state. Raises CheckpointError, and changes nothing, if names, shapes or dtypes differ."""
        self._blocks[block].load(tensors)


def count_of(block: int, counted: Mapping[int, int], units: int, microbatches: int) -> int:
    """Return how many of the first `microbatches`, which give gradients, are counted for a block of a model of `units` layers, by
    the masks of the held layers.

    The ends' shared block counts those of either end. 0 if no end is held.
    """
    ends = [mask for unit, mask in counted.items() if unit in (0, units - 1)]
    masks = ends if block == SHARED else [counted[block]]
    return max(((mask & (1 << microbatches) - 1).bit_count() for mask in masks), default=0)
