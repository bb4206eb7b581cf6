"""Five peers that hold no layer list a further run of the training, so that theirs is exported and restored."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
from attack import Outcome, main

from swarmnode.checkpoints.checkpoint_export import find_whole_step
from swarmnode.checkpoints.votes import Electorate
from swarmnode.swarm.records.run import Run
from tests.checkpoints.test_state_transfer import RUN, World, ready_at

VIRTUAL, FAST = False, True
UNITS, STEP, STRANGERS = 2, 10, 5
FURTHER = Run(data=b"f" * 32, steps=1 << 31, batch=4, microbatch=2)


async def attack() -> Outcome:
    at = {"holder": "9.9.9.9", **{f"stranger {number}": f"8.8.{number}.8" for number in range(STRANGERS)}}
    announced = {
        name: msgspec.structs.replace(one, span=(0, UNITS) if name == "holder" else (0, 0))
        for name, one in ready_at(**at).items()
    }
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        try:
            for name in announced:
                peer = await world.peer(name, RUN if name == "holder" else FURTHER)
                peer.has(STEP if name == "holder" else FURTHER.steps, *range(UNITS))
            electorate = Electorate(announced)
            found = await find_whole_step(world.board, lambda: announced, range(UNITS), UNITS, None, lambda: electorate)
        finally:
            await world.close()
    held = found is not None and (found.run, found.step) == (RUN, STEP)
    said = "none" if found is None else "the holder's" if found.run == RUN else "that of the strangers"
    return Outcome(held, f"of one holder and {STRANGERS} peers without a layer, the run that is restored is {said}")


main(__name__, attack, virtual=VIRTUAL)
