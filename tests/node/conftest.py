"""Whole nodes in virtual time."""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swarmnode.compute.graph.costs.estimate import UnitEstimate
from swarmnode.compute.graph.costs.span_estimate import estimate_span
from swarmnode.compute.model.checkpoint import CONFIG_FILE, Checkpoint
from swarmnode.demo.lesson import generate_alone
from swarmnode.swarm.storage.swarmfile import Swarm, load_swarm
from tests.llama import save_llama
from tests.node.virtual_swarm import VirtualSwarm

PROMPT = [5, 17, 3, 99, 42, 7, 256, 11]


@dataclass(frozen=True)
class TinyModel:
    """A small random Llama on disk, and what one process generates with it."""

    folder: Path
    units: int

    def alone(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        return list(_alone(self.folder, tuple(prompt), max_new_tokens))


@functools.lru_cache
def _alone(folder: Path, prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
    return generate_alone(folder, list(prompt), max_new_tokens)


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
        patch.setattr("swarmnode.roles.training.worker.training_worker.estimate_span", estimate)
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("tiny")
    save_llama(folder, layers=4)
    return TinyModel(folder, units=6)


@pytest.fixture(scope="session")
def founded(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Founded:
    return Founded.on(tiny.folder, tmp_path_factory.mktemp("founded"))
