"""Robust averaging in a whole swarm: one of four replicas that contributes something else than its gradient is found, named and
left out, and the others learn as without it. In virtual time."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from swarmnode.codec.frames import Frame, FrameKind
from swarmnode.codec.messages import decode_body
from swarmnode.codec.tensors import Codec
from swarmnode.codec.training_messages import Part
from swarmnode.compress.codecs import decode, encode
from swarmnode.compute.training.datasets.batches import ArrayBatches
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.run import Averaging
from tests.compute.training.toy import CLASSES, FEATURES, ToySegment
from tests.peer import training_swarm
from tests.peer.training_swarm import local_losses, toy_run
from tests.training.sabotage import Ill, Saboteur
from tests.training.test_hangs import LONGEST_S, Scenario, in_scenario

LIAR = 3
FROM = 60  # frames: it was honest for some steps
WIDTH = 128

Lie = Callable[[np.ndarray], np.ndarray]


class WideSegment(ToySegment):
    """Wide enough for everybody to own a part of the vector."""

    def __init__(self, start: int = 0, end: int = 3, *, breaks: int | None = None) -> None:
        super().__init__(start, end, breaks=breaks)
        torch.manual_seed(3)
        self.modules = [nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)]


class FalseGradients(Saboteur):
    """Contributes something else than its gradient."""

    def __init__(self, lie: Lie) -> None:
        super().__init__(Ill.PINGS, FROM)
        self._lie = lie
        self.lies = 0

    def instead_of(self, frame: Frame) -> Frame | None:
        if self.tripped and frame.kind == FrameKind.PART:
            said = decode_body(frame.kind, frame.body)
            if isinstance(said, Part) and not said.agreed:
                self.lies += 1
                (info,) = said.values
                values = decode(info, frame.payload).numpy()
                _, payload = encode(torch.from_numpy(self._lie(values)), Codec(info.codec))
                return Frame(frame.kind, frame.channel, frame.seq, frame.body, bytes(payload))
        return frame


def batches() -> ArrayBatches:
    """Something that can be learnt: which of the first features is the largest."""
    x = np.random.default_rng(0).normal(size=(480, FEATURES)).astype(np.float32)
    return ArrayBatches({"x": x, "labels": x[:, :CLASSES].argmax(1)}, ["x"], ["labels"])


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_swarm, "ToySegment", WideSegment)
    monkeypatch.setattr(secrets, "randbelow", random.Random(1).randrange)  # the members' projections


async def train(scene: Scenario, steps: int) -> tuple[list[float], set[PeerId]]:
    """The losses of four replicas of the whole model, and who the trainer heard was left out."""
    scene.batches = batches()
    scene.run = toy_run(scene.batches, steps, averaging=Averaging(robust=True), batch=192, microbatch=16)
    for _ in range(4):
        await scene.swarm.join(0, 3)
    _, trainer = await scene.swarm.trainer(scene.run, scene.batches, scene._step, scene._wait)
    assert await asyncio.wait_for(trainer.train(asyncio.Event()), LONGEST_S) == steps
    return [scene.losses[step] for step in range(steps)], trainer.left_out


@pytest.mark.parametrize(("factor", "steps"), [(-4, 20), (100, 10)])
def test_one_of_four_lies(tmp_path: Path, factor: int, steps: int) -> None:
    saboteur = FalseGradients(lambda gradient: np.float32(factor) * gradient)

    async def test(scene: Scenario) -> None:
        losses, left_out = await train(scene, steps)
        clean = local_losses(scene.run, scene.batches)
        assert left_out == {scene.swarm.volunteers[LIAR].peer}, "the user hears who it is"
        assert losses[-1] < clean[-1] + 0.02 * clean[0]

    in_scenario(tmp_path, test, **{f"peer_{LIAR}": saboteur})
    assert saboteur.lies, "it had its chance"


def test_without_a_liar_the_losses_are_those_of_one_process(tmp_path: Path) -> None:
    async def test(scene: Scenario) -> None:
        losses, left_out = await train(scene, 10)
        assert losses == pytest.approx(local_losses(scene.run, scene.batches), rel=0.005)
        assert not left_out

    in_scenario(tmp_path, test)
