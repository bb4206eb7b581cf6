"""Adapters tuned by the nodes of a swarm in virtual time: the curve of one process, whatever fails on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from swarmnode.client.training.preparation import NO_DATA
from swarmnode.client.tuning.client import TunedAdapter, TuneSettings, TuningClient
from swarmnode.client.tuning.local import tune_here
from swarmnode.client.tuning.plan import TuningPlan
from swarmnode.compute.training.adapters.recipe import AdapterRecipe
from swarmnode.compute.training.local import StepSummary
from swarmnode.data.rules import DataRules, DataSummary
from swarmnode.ledger import Account
from swarmnode.swarm.records.recipe import RECIPE, Recipe
from swarmnode.swarm.records.run import Run
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm
from tests.tiny import TinyModel

STEPS = 6
TEXT = "The quick brown fox jumps over the lazy dog. " * 20
LORA = AdapterRecipe(rank=4, alpha=8.0)
TWO_BY_TWO = {"a1": "0:3", "b1": "3:6", "a2": "0:3", "b2": "3:6"}


@dataclass
class Heard:
    """What the owner hears of a tuning. `strike` is called once, after the step `at`."""

    at: int = -1
    strike: Callable[[], None] = lambda: None
    losses: dict[int, float] = field(default_factory=dict)
    held_out: dict[int, float] = field(default_factory=dict)
    plans: list[TuningPlan] = field(default_factory=list)
    why: list[str] = field(default_factory=list)

    def begun(self, run: Run, data: DataSummary) -> None:
        """Nothing to keep."""

    def step(self, report: StepSummary) -> None:
        assert report.step not in self.losses, "a step is told once"
        self.losses[report.step] = report.loss
        if report.held_out_loss is not None:
            self.held_out[report.step] = report.held_out_loss
        if report.step == self.at:
            self.strike()

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        self.why.append(why)


def settings_in(folder: Path, recipe: AdapterRecipe = LORA, **changes: Any) -> TuneSettings:
    data = folder / "data.txt"
    data.write_text(TEXT)
    given = {"steps": STEPS, "batch": 4, "microbatch": 2, "sequence": 16, "learning_rate": 5e-2, "checkpoint_steps": 2}
    schedule = {"schedule": RECIPE, "recipe": Recipe("constant", groups=())}
    run = Run(data=NO_DATA, **{**given, **schedule, **changes})
    return TuneSettings(data, recipe, run, DataRules(), folder / "out")
