"""What holds for all tests."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler.loadscope import LoadScopeScheduling

from tests.thorough import further_cases
from tests.trained import GEMMA3, MINILM, SMOLLM2, trained

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of a hundred processes would compile this house anew
os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch is imported, here or in a process that a test starts: models of tests are so small that a second thread
costs more than it brings, and much more on a machine that does other things, too."""
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""Tests of bits with two threads: a thread that waits for one without a core would take its time slice, 60 ms for each product."""

settings.register_profile("check", deadline=None, derandomize=True)
settings.register_profile("deep", deadline=None, max_examples=5000)  # --hypothesis-profile deep
settings.load_profile("check")

WORKERS = 2
"""For what lives in one process: on two cores a third would only import everything once more."""
WORKERS_WITH_REAL = WORKERS + 1  # one waits for most of its time
GARBAGE_AFTER = 5_000  # objects, not 700: there is seven times less to look through, and tests end before much is left

HOMES = itertools.count()
REAL = "tests/real/"
FLUSHED = "tests/swarm/storage/"
TOGETHER = (REAL, "tests/compute/graph/")
"""Folders for one worker: real swarms would disturb one another, and modules need be exported only once."""


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Return a function that sets the number of threads of torch and ggml, until the test ends."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct: Llama's family, byte pairs, a chat template."""
    return trained(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """The GGUF file of Gemma 3 270M: SentencePiece, layers with a window, no chat template."""
    return trained(GEMMA3)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2: an encoder of texts."""
    return trained(MINILM)


@pytest.fixture(scope="session")
def smollm2_folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain checkpoint that is made of SmolLM2's GGUF file when a swarm is founded on it."""
    from swarmnode.compute.gguf.gguf import GgufCheckpoint

    folder = tmp_path_factory.mktemp("smollm2")
    GgufCheckpoint(smollm2).write(folder)
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """What is imported for the tests stays: the garbage collector looks at it neither meanwhile nor later, as in a node that starts
    (`swarmnode/terminal/console.py`). Otherwise it would take a tenth of the time of tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(GARBAGE_AFTER)
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def nothing_else_is_frozen_or_unfrozen() -> Iterator[None]:
    """Nodes and commands freeze what is there when they have begun; here that would be what earlier tests have left, for good. And
    when they end they let all of it be looked through again, here what was imported for the tests, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def unflushed(request: pytest.FixtureRequest) -> Iterator[None]:
    """No disk is waited for, as no network is: what has to be on it before it is relied on is tested in `tests/swarm/storage`."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.nodeid.startswith(FLUSHED):
            patch.setattr(os, "fsync", os.fstat)  # which refuses what is not open, too
        yield


@pytest.fixture(autouse=True)
def home_of_no_one(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is given no home finds an empty one: founding keeps the swarm's name there."""
    monkeypatch.setenv("SWARMNODE_HOME", str(tmp_path_factory.getbasetemp() / f"home-{next(HOMES)}"))


def pytest_unconfigure() -> None:
    """Nor is what the tests leave looked through once more, and again, while Python ends: that would take seconds."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also run the further cases of a kind (tests/thorough.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those on real processes begin: they wait for most of their time, which the other worker uses. Without --thorough, further
    cases of a kind are left out."""
    items.sort(key=lambda item: not item.nodeid.startswith(REAL))
    if not config.getoption("--thorough"):
        left_out = further_cases(items)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return WORKERS if config.option.markexpr == "not real" else WORKERS_WITH_REAL


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return FileScheduling(config, log)


class FileScheduling(LoadScopeScheduling):
    """Gives each worker file after file, which shares fixtures, or a folder."""

    def _split_scope(self, nodeid: str) -> str:
        folders = (folder for folder in TOGETHER if nodeid.startswith(folder))
        return next(folders, nodeid.split("::", 1)[0])
