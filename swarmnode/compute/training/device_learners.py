"""The learners of one node's devices as one learner, for work on whole blocks between their passes.

Each learner computes passes on its own device's thread, under its lock; the work here holds all locks. A block may be on several
devices: layers that the node has several replicas of, and the weights that the ends of a model share. The first learner that has a
block leads it. The sums of the others are moved to its own before they are read, it alone updates, and its values are copied to
the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from swarmnode.compute.training.averaging.parts import FlatVector, by_block
from swarmnode.compute.training.block import Block
from swarmnode.compute.training.learner import Learner, count_of
from swarmnode.compute.training.saved_activations import Gradients, SavedPiece
from swarmnode.compute.training.segment import Segment, Values, moved
from swarmnode.swarm.records.run import Run

Vectors = Mapping[tuple[int, ...], Tensor]


class DeviceLearners:
    """Learners of one node's devices, as one learner of the blocks of `segment`."""

    def __init__(self, learners: Sequence[Learner], segment: Segment) -> None:
        self.segment = segment
        self.run: Run = learners[0].run
        self._learners = tuple(learners)
        self._holders: dict[int, list[Learner]] = {}  # by block, the leader first
        for learner in learners:
            for number in learner.blocks:
                self._holders.setdefault(number, []).append(learner)

    def __repr__(self) -> str:
        return f"DeviceLearners({list(self._learners)})"

    @property
    def step(self) -> int:
        """Step that all learners are at."""
        return self._learners[0].step

    @step.setter
    def step(self, step: int) -> None:
        for learner in self._learners:
            learner.step = step

    @property
    def blocks(self) -> tuple[int, ...]:
        """Numbers of the blocks of parameters that this node trains, in order."""
        return tuple(sorted(self._holders))

    @property
    def counted(self) -> dict[int, int]:
        """Mask of the counted microbatches for each layer, over all devices."""
        counted: dict[int, int] = {}
        for learner in self._learners:
            for unit, mask in learner.counted.items():
                counted[unit] = counted.get(unit, 0) | mask
        return counted

    def count_of(self, block: int) -> int:
        """Return how many microbatches all devices together have counted for a block, see `Learner.count_of`."""
        return count_of(block, self.counted, self.segment.units, self.run.microbatches)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient sums of all blocks, each once."""
        return sum(self._block(number).sums_N.nbytes for number in self._holders)

    @property
    def state_bytes(self) -> int:
        """Bytes of the training state (parameters and the optimiser's memory) of all blocks here."""
        return sum(tensor.nbytes for number in self._holders for tensor in self.state(number).values())

    def discard(self) -> None:
        """Forget everything of this step: sums of gradients, counted microbatches, and passes that wait for gradients."""
        with self._alone():
            for learner in self._learners:
                learner.discard()

    # -- what others may check

    def has_counted(self, index: int, start: int, end: int) -> bool:
        """Return whether any of layers [start, end) has counted microbatch `index`."""
        return any(learner.has_counted(index, *held) for learner, held in self._among(start, end))

    def parameters(self, start: int, end: int) -> dict[int, list[Tensor]]:
        """Return the parameters of layers [start, end) by block number, in order. With the first or last layer come the
        parameters that both share."""
        found = [learner.parameters(*held) for learner, held in self._among(start, end)]
        by_number = {number: tensors for held in reversed(found) for number, tensors in held.items()}
        return dict(sorted(by_number.items()))

    def compute(self, index: int, start: int, end: int, inputs: Values, labels: Values = ()) -> Values:
        """Return the outputs of layers [start, end), all on one device, without counting the microbatch; see `Learner.compute`."""
        learner, _ = next(self._among(start, end))
        with learner.lock:
            device = learner.segment.device
            return learner.compute(index, start, end, moved(inputs, device), moved(labels, device))

    def gradients(
        self, index: int, piece: SavedPiece, grads: Gradients, wanted: Sequence[Tensor], labels: Values = ()
    ) -> list[Tensor | None]:
        """Return gradients without counting, for layers on one device; see `Learner.gradients`.

        A gradient is None if the outputs do not depend on the tensor.
        """
        learner, _ = next(self._among(piece.start, piece.end))
        with learner.lock, torch.enable_grad():
            device = learner.segment.device
            here = replace(piece, inputs=moved(piece.inputs, device))
            return learner.gradients(index, here, grads, wanted, moved(labels, device))

    def _among(self, start: int, end: int) -> Iterator[tuple[Learner, tuple[int, int]]]:
        """Yield the learners that have some of layers [start, end), and the range that each has."""
        for learner in self._learners:
            low, high = max(start, learner.segment.start), min(end, learner.segment.end)
            if low < high:
                yield learner, (low, high)

    # -- the end of a step

    def shapes(self, blocks: Sequence[int]) -> list[torch.Size]:
        """Return the shapes of the tensors in `gradient`, see `Learner.shapes`."""
        return [shape for number in blocks for shape in self._block(number).shapes]

    def gradient(self, blocks: Sequence[int]) -> FlatVector:
        """Return the float32 sums of these blocks as one vector. Raises KeyError for a block that is not held.

        They are not copied if they are on one device, otherwise they are copied to that of the first.
        """
        with self._alone():
            self._gather()
            sums = [self._block(number).sums_N for number in blocks]
            if len({sums_N.device for sums_N in sums}) > 1:
                sums = [torch.cat([sums_N.to(sums[0].device) for sums_N in sums])]
            return FlatVector(sums)

    def lengths(self, blocks: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return for each block its length in `gradient`, and how many of its first elements are gradients."""
        return {block: (self._size(block), len(self._block(block).gradient_N)) for block in blocks}

    def squared_norm(self, blocks: Sequence[int], flat: Tensor | None = None) -> float:
        """Return the squared norm of the gradients of these blocks on all devices; see `Learner.squared_norm`."""
        with self._alone():
            self._gather()
            parts = {} if flat is None else by_block({tuple(blocks): flat}, self._size)
            return sum(self._leader(number).squared_norm([number], parts.get(number)) for number in blocks)

    def apart_squared_norm(self, blocks: Sequence[int]) -> float:
        """Return the squared norm of the mean gradient of the microbatches counted here, see `Learner.apart_squared_norm`."""
        with self._alone():
            self._gather()
            return sum(self._leader(number).apart_squared_norm([number]) for number in blocks)

    def pseudo_gradients(self, blocks: Sequence[int]) -> Tensor:
        """Return the pseudo-gradients on the device of the first block, see `Learner.pseudo_gradients`."""
        with self._alone():
            ways = [self._leader(number).pseudo_gradients([number]) for number in blocks]
            return torch.cat([way_N.to(ways[0].device) for way_N in ways])

    def commit(
        self,
        sums: Vectors,
        norm: float,
        *,
        summed: Collection[int] | None = None,
        apart: Collection[int] = (),
        pseudo_gradients: Vectors = MappingProxyType({}),
    ) -> None:
        """Update the parameters on all devices and go on to the next step; see `Learner.commit`."""
        agreed, averaged = by_block(sums, self._size), by_block(pseudo_gradients, self._size)
        updated = self._holders.keys() if summed is None else summed
        with self._alone():
            self._gather()
            for learner in self._learners:
                led = {number for number in learner.blocks if self._leader(number) is learner}
                device = learner.segment.device
                learner.commit(
                    {(number,): agreed[number] for number in led & agreed.keys()},
                    norm,
                    summed=led.intersection(updated),
                    apart=led.intersection(apart),
                    pseudo_gradients={(number,): averaged[number].to(device) for number in led & averaged.keys()},
                )
            self._follow(self._holders)

    def _gather(self) -> None:
        """Add the sums of each block to those of its first holder, and let all devices know which microbatches have been
        counted."""
        for number, (leader, *others) in self._holders.items():
            for other in others:
                other.block(number).hand_over(leader.block(number))
        if any(len(holders) > 1 for holders in self._holders.values()):
            counted = self.counted
            for learner in self._learners:
                learner.counted.update((unit, counted[unit]) for unit in learner.counted)

    def _follow(self, blocks: Collection[int]) -> None:
        for number in blocks:
            leader, *others = self._holders[number]
            for other in others:
                other.block(number).follow(leader.block(number))

    def _leader(self, number: int) -> Learner:
        return self._holders[number][0]

    def _block(self, number: int) -> Block:
        """Return block `number` of the device that leads it."""
        return self._leader(number).block(number)

    def _size(self, number: int) -> int:
        return len(self._block(number).sums_N)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep all devices from computing passes. Locks are taken in one order, so that two callers cannot block each other."""
        with ExitStack() as locks:
            for learner in self._learners:
                locks.enter_context(learner.lock)
            yield

    # -- state

    def state(self, block: int) -> dict[str, Tensor]:
        """Return the training state of a block (parameters, buffers, the optimiser's memory) by name: references, not copies."""
        return self._leader(block).state(block)

    def copy_state(self) -> dict[int, dict[str, Tensor]]:
        """Return the states of all blocks at this step, copied to the host's memory."""
        with self._alone():
            return {
                block: {name: tensor.to("cpu", copy=True) for name, tensor in self.state(block).items()}
                for block in self.blocks
            }

    def load(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Load a state. Raises CheckpointError, and changes nothing, if names, shapes or dtypes differ."""
        with self._alone():
            self._leader(block).load(block, tensors)
            self._follow([block])
