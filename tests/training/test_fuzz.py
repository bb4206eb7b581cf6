"""Any one peer, at any message, stops answering, answers FAILED, or answers only PING: the steps are done all the same, by the
losses of one process, or the user hears who waits for what.

`python -m tests.training.test_fuzz 0 300` tries these seeds, some hundred in a few minutes.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from pathlib import Path

import pytest

from tests.training.sabotage import Ill, Saboteur
from tests.training.test_hangs import Scenario, in_scenario

SEEDS = 12
UNITS = (0, 0, 1, 1, 2, 2)
TRAINER = len(UNITS)
MESSAGES = 150  # at the latest then: it has seen some steps


def try_seed(folder: Path, seed: int) -> str:
    """One swarm with one peer that falls ill; what it was that it had."""
    rng = random.Random(seed)
    number, saboteur = rng.randrange(TRAINER + 1), Saboteur(rng.choice(list(Ill)), rng.randrange(1, MESSAGES))

    async def test(scene: Scenario) -> None:
        await scene.join(*UNITS)
        if number == TRAINER:
            _, ill = await scene.swarm.trainer(scene.run, scene.batches, lambda _report: None)
            feeding = asyncio.ensure_future(ill.train(asyncio.Event()))
        try:
            await scene.train()
        except TimeoutError:
            pytest.fail(f"seed {seed}: peer {number} {saboteur.ill.value}; last heard: {scene.waits[-2:]}")
        finally:
            if number == TRAINER:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)

    in_scenario(folder, test, **{f"peer_{number}": saboteur})
    return f"peer {number} {saboteur!r}"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_one_peer_falls_ill(tmp_path: Path, seed: int) -> None:
    try_seed(tmp_path, seed)


if __name__ == "__main__":
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        with tempfile.TemporaryDirectory() as folder:
            print(seed, try_seed(Path(folder), seed), flush=True)
