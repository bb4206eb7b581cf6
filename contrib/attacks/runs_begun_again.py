"""A coordinator of an open training begins one run after another, so that a volunteer's disk fills with their states."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
from attack import Outcome, main

from swarmnode.codec.training_messages import Begin
from swarmnode.swarm.records.run import encode_run
from tests.training.scene import RUN, Scene

VIRTUAL, FAST = True, True
RUNS = 12
MOST = 2


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        async with Scene(Path(folder)) as scene:
            line = await scene.lead()
            for seed in range(1, RUNS):
                await line.ask(Begin(encode_run(msgspec.structs.replace(RUN, seed=seed))))
            kept, size_kb = held_by(Path(folder))
            return Outcome(kept <= MOST, f"{RUNS} runs begun, {kept} kept: {size_kb:.0f} kB")


def held_by(folder: Path) -> tuple[int, float]:
    """Return the number of runs in `folder` and their size in kB."""
    runs = sum(path.is_dir() for path in folder.iterdir())
    return runs, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e3


main(__name__, attack, virtual=VIRTUAL)
