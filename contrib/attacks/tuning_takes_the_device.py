"""An owner opens, updates and loads adapters in a loop, or feeds large microbatches, so that sessions wait for the device."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from attack import Outcome, main

from swarmnode.codec.messages import Error
from swarmnode.codec.tuning_messages import TuneLabels, TuneLoss, Update
from swarmnode.compress.codecs import encode_values
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.errors import PeerError
from swarmnode.tuning.adapter_parts import encode_recipe
from tests.tiny import TinyModel
from tests.training.scene import Talk
from tests.tuning.test_server import UNITS, Scene, TuneInput, scene_of, state_of

VIRTUAL, FAST = True, True
SHARE, ITEM_S, POSITIONS, ROWS, LENGTH, FOR_S = 0.3, 0.1, 512, 64, 32, 20.0
METHODS = ("dora", "lora-fa")


def recipe_of(method: str) -> bytes:
    return encode_recipe(AdapterRecipe(method=method, rank=2))


async def opens(scene: Scene, talk: Talk, turn: int) -> None:
    await scene.open(recipe=recipe_of(METHODS[turn % 2]), epoch=2 + turn)


async def updates(_scene: Scene, talk: Talk, turn: int) -> None:
    await talk.ask(Update(turn, 1e-2, 1.0))


async def fetches(_scene: Scene, talk: Talk, _turn: int) -> None:
    await state_of(talk, 0)


async def feeds(_scene: Scene, talk: Talk, turn: int) -> None:
    infos, payload = encode_values((torch.zeros(ROWS, LENGTH, dtype=torch.int64),))
    talk.send(TuneLabels(0, turn, infos, 1e-4), payload)
    talk.send(TuneInput(0, turn, infos, False), payload)
    while not isinstance(answer := await talk.next(), TuneLoss | Error | PeerError):
        pass
    assert isinstance(answer, TuneLoss)


async def share_of(span: ModelSpan, method: str, does: Callable[[Scene, Talk, int], Any]) -> tuple[float, int]:
    """Return the share of the device's time that tuning takes, and the most positions that one item takes through a layer."""
    clock, forward, positions = asyncio.get_running_loop().time, ModelSpan.forward, [0]
    async with scene_of(span, cost_s=ITEM_S, share=SHARE) as scene:

        def watch(span: ModelSpan, x: torch.Tensor, **options: Any) -> torch.Tensor:
            positions.append(x.shape[0] * x.shape[1] if options["start"] < UNITS - 1 else 0)
            return forward(span, x, **options)

        talk, _ = await scene.open(recipe=recipe_of(method), rows=ROWS, positions=LENGTH)
        began_s, busy_s, turn = clock(), scene.busy_s, 0
        with patch.object(ModelSpan, "forward", watch):
            while clock() < began_s + FOR_S:
                await does(scene, talk, turn)
                turn += 1
        return (scene.busy_s - busy_s) / (clock() - began_s), max(positions)


async def attack() -> Outcome:
    said = []
    with tempfile.TemporaryDirectory() as folder:
        tiny = TinyModel.save(Path(folder), layers=UNITS - 2)
        span = load_span(Checkpoint(tiny.folder), 0, UNITS, check=False)
        for method in METHODS:
            for does in (opens, updates, fetches, feeds):
                share, positions = await share_of(span, method, does)
                if share > SHARE + 0.05:
                    said.append(f"an owner that {does.__name__} ({method}) takes {share:.0%} of the device")
                if positions > POSITIONS:
                    said.append(f"sessions wait for {positions} positions of a microbatch ({method})")
    return Outcome(not said, "; ".join(said) or f"tuning takes {SHARE:.0%} of the device whatever its owner does")


main(__name__, attack, virtual=VIRTUAL)
