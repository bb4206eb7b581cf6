"""A peer asks a tuning node for adapters that it can never have, so that honest owners lose their places for no adapter at all."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attack import Outcome, main

from swarmnode.codec.messages import Error
from swarmnode.codec.tuning_messages import AdapterOpened
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.tuning.server import ADAPTERS
from tests.tiny import TinyModel
from tests.tuning.test_server import FROZEN_RANK, UNITS, recipe_of, scene_of

VIRTUAL, FAST = True, True
VAIN = {
    "a rank that the memory cannot have": recipe_of(rank=4096, targets="all-linear"),
    "a rank that the method cannot have": FROZEN_RANK,
    "layers of another model": recipe_of(targets=("sft_proj",)),
    "some layers of another model": recipe_of(targets=("q_proj", "sft_proj")),
    "no recipe": b"\xc1",
}


async def attack() -> Outcome:
    said = []
    with tempfile.TemporaryDirectory() as folder:
        tiny = TinyModel.save(Path(folder), layers=UNITS - 2)
        span = load_span(Checkpoint(tiny.folder), 0, UNITS, check=False)
        for name, recipe in VAIN.items():
            async with scene_of(span) as scene:
                places = [object() for _ in range(ADAPTERS)]
                for number, place in enumerate(places):
                    scene.server._places.admit(place, Claimant(f"home {number}", f"owner {number}"))
                _, answer = await scene.open(recipe=recipe)
                lost = sum(place not in scene.server._places for place in places)
                if lost or isinstance(answer, AdapterOpened):
                    code = answer.code if isinstance(answer, Error) else "an adapter"
                    said.append(f"{name}: {lost} owner lost its place, and the answer was {code}")
    return Outcome(not said, "; ".join(said) or f"{len(VAIN)} openings in vain, and no owner lost its place")


main(__name__, attack, virtual=VIRTUAL)
