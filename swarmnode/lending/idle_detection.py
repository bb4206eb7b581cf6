"""Idle detection: for how long nobody has used this machine, by what the desktop tells logind and what was typed at terminals."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

TERMINALS = ("dev/pts/[0-9]*", "dev/tty[0-9]*")
ASK_S = 10.0  # logind and NetworkManager are asked no more often
ANSWER_S = 2.0

T = TypeVar("T")


class Rarely(Generic[T]):
    """Last answer of `ask`, which is asked again after `ASK_S` at the earliest."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._answer: tuple[float, T] | None = None  # when it was asked, and what it said

    def __repr__(self) -> str:
        return f"<Rarely {self._ask!r}>"

    def __call__(self) -> T:
        now_s = time.monotonic()
        if self._answer is None or now_s - self._answer[0] >= ASK_S:
            self._answer = now_s, self._ask()
        return self._answer[1]


class IdleDetection:
    """The latest use of this machine that anything tells of."""

    def __init__(self) -> None:
        self._idle_since = Rarely(logind_idle_since)

    def __repr__(self) -> str:
        return f"<IdleDetection by {self._idle_since!r}>"

    def idle_s(self) -> float | None:
        """Return the seconds since the last use; None where nothing tells."""
        touched = [time_s for time_s in (self._idle_since(), _last_typed()) if time_s is not None]
        return max(0.0, time.time() - max(touched)) if touched else None


def logind_idle_since(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> float | None:
    """Unix time of the last use as the desktop tells logind: now while it is in use, None where there is neither."""
    command = ["loginctl", "show-seat", "seat0", "--property=IdleHint", "--property=IdleSinceHint"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        told = run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout
        values = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
        if "IdleHint" not in values or not values.get("IdleSinceHint", ""):
            return None
        return int(values["IdleSinceHint"]) / 1e6 if values["IdleHint"] == "yes" else time.time()
    return None


def _last_typed() -> float | None:
    """Unix time when somebody last typed at a terminal, also over ssh."""
    times = []
    for pattern in TERMINALS:
        for path in Path("/").glob(pattern):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_atime)
    return max(times, default=None)
