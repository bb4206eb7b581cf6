"""Whole nodes in virtual time."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swarmnode.compute.graph.costs.estimate import UnitEstimate, estimate_span
from swarmnode.compute.model.checkpoint import CONFIG_FILE, Checkpoint
from swarmnode.swarm.records.manifest import TRAIN
from swarmnode.swarm.storage.swarmfile import Swarm, load_swarm
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import TinyModel
from tests.training_results import save_gpt2


@dataclass(frozen=True)
class Founded:
    """A .swarm file that any number of swarms, each in a world of its own, may begin with."""

    file: Path

    @classmethod
    def on(cls, model: Path, folder: Path, **options: Any) -> Founded:
        """Found a swarm on a checkpoint; `options` as of `found_swarm`."""

        async def found() -> Path:
            swarm = VirtualSwarm(folder)
            swarm.create(model, **options)
            return swarm.file

        return cls(asyncio.run(found()))

    @property
    def swarm(self) -> Swarm:
        return load_swarm(self.file)

    def into(self, swarm: VirtualSwarm) -> None:
        """Let a swarm be this one."""
        shutil.copy2(self.file, swarm.file)


@pytest.fixture(scope="session", autouse=True)
def estimated_once() -> Iterator[None]:
    """What training asks of a machine follows from the config: it is found once, not by each of the nodes of this process."""
    known: dict[tuple[object, ...], list[UnitEstimate]] = {}

    def estimate(checkpoint: Checkpoint, batch: int, sequence: int) -> list[UnitEstimate]:
        asked = ((checkpoint.path / CONFIG_FILE).read_bytes(), batch, sequence)
        if asked not in known:
            known[asked] = estimate_span(checkpoint, batch, sequence)
        return known[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swarmnode.training.worker.training_parts.estimate_span", estimate)
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def founded(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Founded:
    return Founded.on(tiny.folder, tmp_path_factory.mktemp("founded"))


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of two layers on bytes, with dropout, whose ends share their matrix: four units."""
    folder = tmp_path_factory.mktemp("gpt2")
    save_gpt2(folder, layers=2, heads=2, width=32, positions=32)
    return folder


@pytest.fixture(scope="session")
def training(gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Founded:
    """A swarm that trains it."""
    return Founded.on(gpt2, tmp_path_factory.mktemp("training"), mode=TRAIN)
