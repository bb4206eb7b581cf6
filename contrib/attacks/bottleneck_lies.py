"""A stage of a model with a bottleneck sends a false number of a token's few, or names another token, to steer all behind it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attack import Outcome, main

from tests.training.test_bottleneck import LIAR, LIES, ThinSwarm

VIRTUAL, FAST = True, True


async def attack(*, share: float = 1.0) -> Outcome:
    """Try two lies, in the numbers and in the tokens that go forward. `share`: what honest replicas spend on checks."""
    fell: list[str] = []
    for what, name in (("sends", "one number"), ("names", "another token")):
        with tempfile.TemporaryDirectory() as folder:
            swarm = ThinSwarm(Path(folder))
            try:
                left_out = await swarm.found_false(what, LIES[name], share=share)
                if left_out != {swarm.volunteers[LIAR].peer}:
                    fell.append(f"{what}, {name}: {len(left_out)} left out")
            finally:
                await swarm.close()
    return Outcome(not fell, "; ".join(fell) or "the false stage was found and left out, and no honest one")


main(__name__, attack, virtual=VIRTUAL)
