"""Learners on several devices of a node end each step as one learner of all units would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.segment import Segment, SplitSegment
from tests.compute.training.conftest import MICROBATCHES, learners, make_run, pass_through, train

STEPS = 2
UNITS = 5
WHOLE = (0, UNITS)
Get = Callable[[str], Checkpoint]


def on_devices(checkpoint: Any, replicas: Sequence[Sequence[tuple[int, int]]], **run: Any) -> Nodes:
    return Nodes([[load_segment(checkpoint, *span) for span in replica] for replica in replicas], **run)


class Nodes:
    """One node with so many devices, all of them the CPU."""

    def __init__(self, replicas: Sequence[Sequence[Segment]], **run: Any) -> None:
        held: set[int] = set()
        self.chains: list[list[Learner]] = []
        for replica in replicas:
            self.chains.append([])
            for segment in replica:
                blocks = {*segment.parameters(), *range(segment.start, segment.end)}
                self.chains[-1].append(Learner(segment, make_run(**run), follows=held & blocks))
                held |= blocks
        self.learners = DeviceLearners([one for chain in self.chains for one in chain], SplitSegment(replicas[0]))

    def train(self, steps: int) -> list[float]:
        """The loss of each step; microbatches go round."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        losses = [pass_through(self.chains[index % len(self.chains)], index) for index in range(MICROBATCHES)]
        self.learners.commit({}, self.learners.squared_norm(self.learners.blocks) ** 0.5)
        return sum(losses) / MICROBATCHES


LAYOUTS = {
    "one behind another": [[(0, 2), (2, UNITS)]],
    "on each": [[(0, UNITS)], [(0, UNITS)]],
    "both": [[(0, 3), (3, UNITS)], [(0, UNITS)]],
}


@pytest.mark.parametrize(
    ("kind", "layout"), [("llama", "one behind another"), ("llama", "both"), ("gpt2-dropout", "on each")]
)
def test_the_curve_and_all_states_are_those_of_one_device(checkpoint: Get, kind: str, layout: str) -> None:
    alone = learners(checkpoint(kind), make_run(), WHOLE)
    node = on_devices(checkpoint(kind), LAYOUTS[layout])
    assert node.train(STEPS) == pytest.approx(train(alone, STEPS), rel=1e-5)
    assert node.learners.blocks == alone[0].blocks and node.learners.step == STEPS
    for block in node.learners.blocks:
        for name, tensor in alone[0].state(block).items():
            torch.testing.assert_close(node.learners.state(block)[name], tensor, rtol=1e-4, atol=1e-5)
    copies: dict[str, Tensor] = {}
    for chain in node.chains:
        for learner in chain:
            for block in learner.blocks:
                for name, tensor in learner.state(block).items():
                    assert torch.equal(copies.setdefault(f"{block} {name}", tensor), tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_in_the_order_in_which_spot_checks_show_their_sketches(checkpoint: Get, layout: str) -> None:
    (alone,) = learners(checkpoint("gpt2-dropout"), make_run(), WHOLE)
    node = on_devices(checkpoint("gpt2-dropout"), LAYOUTS[layout])
    assert list(node.learners.parameters(*WHOLE)) == sorted(alone.parameters(*WHOLE))


def test_copies_have_no_optimiser_of_their_own(checkpoint: Get) -> None:
    alone = learners(checkpoint("llama"), make_run(), WHOLE)[0]
    first, second = (chain[0] for chain in on_devices(checkpoint("llama"), LAYOUTS["on each"]).chains)
    assert (first.optimizer_bytes, second.optimizer_bytes) == (alone.optimizer_bytes, 0)


def test_an_attempt_that_fails_counts_nothing_twice(checkpoint: Get) -> None:
    """Norms are asked for as often as replicas among the peers try to agree; what is late comes on top once."""
    (alone,) = learners(checkpoint("gpt2-dropout"), make_run(), WHOLE)
    node = on_devices(checkpoint("gpt2-dropout"), LAYOUTS["both"])
    for index in range(MICROBATCHES):
        pass_through([alone], index)
        pass_through(node.chains[index % 2], index)
        for _ in range(2):
            node.learners.squared_norm(node.learners.blocks)
        pass_through(node.chains[1 - index % 2], index)  # the same one again, on the other device
    got, wanted = node.learners.gradient(alone.blocks).copy(), alone.gradient(alone.blocks).copy()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    assert node.learners.counted == alone.counted
    node.learners.discard()
    assert not node.learners.gradient(alone.blocks).copy().any()
    assert not any(node.learners.counted.values())


def test_a_state_is_taken_over_by_all_copies(checkpoint: Get) -> None:
    node, heir = (on_devices(checkpoint("gpt2-dropout"), LAYOUTS["both"]) for _ in range(2))
    node.train(2)
    for block, tensors in node.learners.copy_state().items():
        heir.learners.load(block, tensors)
    heir.learners.step = node.learners.step
    assert heir.train(2) == node.train(2)


def test_a_sum_of_another_length_changes_nothing(checkpoint: Get) -> None:
    node = on_devices(checkpoint("llama"), LAYOUTS["one behind another"])
    pass_through(node.chains[0], 0)
    with pytest.raises(ValueError, match="a flat gradient of shape"):
        node.learners.commit({(0, 1): torch.zeros(3)}, 1.0)
    assert node.learners.step == 0 and node.learners.counted[0] == 1
