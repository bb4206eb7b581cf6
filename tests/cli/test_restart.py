"""Who cannot compute any more begins anew: the same command, after pauses that grow."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import pytest

from swarmnode.errors import ExecutorDied
from swarmnode.terminal.console import COUNT, LASTED_S, LONGEST_PAUSE_S, begin_anew, pause_s


class Replaced(Exception):
    """The process is another one now."""


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []

    def execv(path: str, arguments: list[str]) -> None:
        seen.append((path, arguments))
        raise Replaced

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(time, "sleep", seen.append)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "swarmnode", "run", "some.swarm"])
    monkeypatch.setenv(COUNT, "3")
    return seen


@pytest.mark.parametrize(("lived_s", "pause", "count"), [(5.0, 8.0, "4"), (LASTED_S, 1.0, "1")])
def test_the_same_command_begins_anew(
    replaced: list[Any], lived_s: float, pause: float, count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Replaced):
        begin_anew(ExecutorDied("the compute thread died"), lived_s)
    assert replaced == [pause, (sys.executable, [sys.executable, "-m", "swarmnode", "run", "some.swarm"])]
    assert os.environ[COUNT] == count
    assert f"the compute thread died. Starting again in {pause:.0f} s" in capsys.readouterr().err


def test_pauses_double_up_to_the_longest() -> None:
    pauses = [pause_s(restarts) for restarts in range(40)]
    assert pauses[:4] == [1, 2, 4, 8] and pauses[-1] == LONGEST_PAUSE_S and pauses == sorted(pauses)
