"""Machines that are fast at float16 alone train with others: nobody notices but by the last digits, and overflows cost no step."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
import torch

from swarmnode.compute.training import learner as learner_module
from swarmnode.compute.training import passes
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.test_training import DATA, SETTINGS, school_of
from tests.training_results import assert_same_curve, assert_same_parameters, losses_of_one_process

STEPS = 4
RUN = msgspec.structs.replace(
    SETTINGS, steps=STEPS, warmup_steps=1, batch=12, microbatch=3, checkpoint_steps=2, autocast=True
)
SPANS = ("0:2", "2:4")
PAIRS = [f"{span}-{replica}" for span in SPANS for replica in ("a", "b")]
DTYPES = {"all": [torch.float16], "one replica of each": [torch.float16, None]}


@pytest.fixture(scope="module")
def alone(gpt2: Path, training: Founded) -> dict[int, float]:
    """In float32."""
    return losses_of_one_process(training.swarm.manifest, gpt2, DATA, RUN)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@in_virtual_time
async def test_the_curve_of_one_process_in_float32(
    training: Founded,
    alone: dict[int, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtypes: list[torch.dtype | None],
) -> None:
    """Two stages of two replicas, whose first scales overflow; the replicas end with the same parameters."""
    of_learners, overflows = itertools.cycle(dtypes), 0
    learn = passes.GradScaler._learn

    def noted(scaler: passes.GradScaler, *, overflowed: bool) -> None:
        nonlocal overflows
        overflows += overflowed
        learn(scaler, overflowed=overflowed)

    monkeypatch.setattr(learner_module, "autocast_dtype", lambda _device, *, wanted: next(of_learners))
    monkeypatch.setattr(passes, "FIRST_EXPONENT", 24)
    monkeypatch.setattr(passes.GradScaler, "_learn", noted)
    async with school_of(training, tmp_path) as school:
        school.steps = STEPS
        for name in PAIRS:
            school.start(name, name.split("-")[0])
            await school.members[name].wait_for("ready")
        trainer = school.trainer("trainer", DATA, RUN)
        assert await trainer.finish() == STEPS
        assert overflows
        assert_same_curve(trainer.losses, alone, steps=STEPS)
        await school.stop(PAIRS)
        assert_same_parameters(school, PAIRS, spans=len(SPANS))
