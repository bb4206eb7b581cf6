"""An owner fills a tuning node's memory with inputs, labels or gradients that wait for something it never sends."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from attack import Outcome, main

from swarmnode.codec.body import HopSpec
from swarmnode.codec.tuning_messages import AdapterOpened, GetAdapter, TuneInput, TuneLabels
from swarmnode.compress.codecs import encode_values
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.loading import load_span
from swarmnode.errors import PeerError
from tests.tiny import TinyModel
from tests.training.scene import Talk
from tests.tuning.test_server import UNITS, Scene, one_step, scene_of

VIRTUAL, FAST = True, True
ROWS, POSITIONS, WINDOW, HOST_BYTES = 32, 32, 32, 3 << 20
FORGOTTEN_S = 60.0


def hidden(scene: Scene) -> torch.Tensor:
    return torch.zeros(ROWS, POSITIONS, scene.hidden_size)


def next_inputs(scene: Scene, talk: Talk, number: int) -> None:
    infos, payload = encode_values((hidden(scene),))
    talk.send(TuneInput(1, number, infos), payload)


def inputs_without_labels(scene: Scene, talk: Talk, number: int) -> None:
    infos, payload = encode_values((hidden(scene),))
    talk.send(TuneInput(0, number, infos), payload)


def labels_without_inputs(scene: Scene, talk: Talk, number: int) -> None:
    infos, payload = encode_values((torch.zeros(ROWS, POSITIONS, scene.hidden_size, dtype=torch.int64),))
    talk.send(TuneLabels(0, number, infos), payload)


WAYS: dict[str, tuple[int, Callable[[Scene, Talk, int], None]]] = {
    "inputs of the next step": (UNITS, next_inputs),
    "inputs without labels": (UNITS, inputs_without_labels),
    "inputs without gradients": (UNITS - 1, inputs_without_labels),
    "labels without inputs": (UNITS, labels_without_inputs),
}


async def keep(talk: Talk) -> None:
    """Be heard now and then, so that the node does not forget the adapter."""
    with suppress(PeerError, asyncio.TimeoutError):
        while True:
            talk.send(GetAdapter(0))
            await asyncio.sleep(FORGOTTEN_S / 3)


async def harm_of(span: ModelSpan, end: int, send: Callable[[Scene, Talk, int], None]) -> str:
    """Return what the attacker did to the node and to another owner; empty if nothing."""
    async with scene_of(span) as scene:
        host, found = scene.server.switchboard.ledger, []
        scene.ledger.limit_bytes, host.limit_bytes = 1 << 30, HOST_BYTES
        route = (HopSpec(scene.peer, 1, end),)
        talk, answer = await scene.open(route=route, rows=ROWS, positions=POSITIONS, window=WINDOW)
        assert isinstance(answer, AdapterOpened)
        with suppress(PeerError):
            for number in range(WINDOW):
                send(scene, talk, number)
                await asyncio.sleep(0.1)
        keeping = asyncio.ensure_future(keep(talk))
        await asyncio.sleep(5.0)
        if host.free_bytes < HOST_BYTES / 3:
            found.append(f"{host.free_bytes / HOST_BYTES:.0%} of the memory is left to others")
        try:
            other, _ = await scene.open(1)
            await one_step(other)
        except (PeerError, AssertionError, asyncio.TimeoutError) as error:
            found.append(f"another owner cannot train: {error!r}"[:90])
        await asyncio.sleep(2 * FORGOTTEN_S)
        if any(one.owner != scene.others[1] for one in scene.server._adapters.values()):
            found.append(f"it waits for more than {2 * FORGOTTEN_S:.0f} s")
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    return ", ".join(found)


async def attack() -> Outcome:
    said = []
    with tempfile.TemporaryDirectory() as folder:
        tiny = TinyModel.save(Path(folder), layers=UNITS - 2)
        span = load_span(Checkpoint(tiny.folder), 0, UNITS, check=False)
        for name, (end, send) in WAYS.items():
            if harm := await harm_of(span, end, send):
                said.append(f"{name}: {harm}")
    return Outcome(not said, "; ".join(said) or f"{len(WAYS)} ways, and others have their share of the memory")


main(__name__, attack, virtual=VIRTUAL)
