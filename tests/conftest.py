"""What holds for all tests."""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch is imported, here or in a process that a test starts: models of tests are so small that a second thread
costs more than it brings, and much more on a machine that does other things, too."""

REAL = "tests/real/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those on real processes begin: they wait for most of their time, which the other worker uses."""
    items.sort(key=lambda item: not item.nodeid.startswith(REAL))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return FileScheduling(config, log)


class FileScheduling(LoadScopeScheduling):
    """Gives each worker file after file, which shares fixtures; all of tests/real to one, so that real swarms do not disturb
    one another."""

    def _split_scope(self, nodeid: str) -> str:
        return REAL if nodeid.startswith(REAL) else nodeid.split("::", 1)[0]
