"""Idle detection and the other observations of this machine that rules need; and giving way to other programs.

The idle time follows from the desktop's reports to logind and from typing at terminals.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from swarmnode.lending.cards import Cards
from swarmnode.lending.lending import Rules, Surroundings

log = logging.getLogger(__name__)

PRESSURE = Path("/proc/pressure/memory")
METERED = {"1": True, "2": False, "3": True, "4": False}  # NMMetered: yes, no, and its guesses
TERMINALS = ("dev/pts/[0-9]*", "dev/tty[0-9]*")
ASK_S = 10.0  # logind and NetworkManager are not asked more often
ANSWER_S = 2.0

T = TypeVar("T")


def yield_cpu(nice: int) -> None:
    """Lower this process's CPU priority by `nice` steps, 0 to 19; not on Windows."""
    if sys.platform != "win32":
        os.nice(nice)


def yield_disk() -> None:
    """Give other programs precedence on the disk (the idle class of Linux), for this process and those that it starts
    later."""
    if sys.platform == "linux":
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    else:
        log.warning("--idle-disk has no effect here: only Linux has priorities for disks")


class Rarely(Generic[T]):
    """Cached answer of `ask`, which is called again after `ASK_S` seconds at the earliest."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._answer: tuple[float, T] | None = None  # when `ask` was called, and its answer

    def __call__(self) -> T:
        now_s = time.monotonic()
        if self._answer is None or now_s - self._answer[0] >= ASK_S:
            self._answer = now_s, self._ask()
        return self._answer[1]


class IdleDetection:
    """Detection of the latest use of this machine."""

    def __init__(self) -> None:
        self._idle_since = Rarely(logind_idle_since)

    def idle_s(self) -> float | None:
        """Return the seconds since the last use; None if neither logind nor a terminal shows any."""
        touched = [time_s for time_s in (self._idle_since(), _last_typed()) if time_s is not None]
        return max(0.0, time.time() - max(touched)) if touched else None


def logind_idle_since(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> float | None:
    """Return the unix time of the last use that the desktop reported to logind; now if it is in use; None without
    logind or desktop."""
    command = ["loginctl", "show-seat", "seat0", "--property=IdleHint", "--property=IdleSinceHint"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        told = run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout
        values = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
        if "IdleHint" not in values or not values.get("IdleSinceHint", ""):
            return None
        return int(values["IdleSinceHint"]) / 1e6 if values["IdleHint"] == "yes" else time.time()
    return None


def _last_typed() -> float | None:
    """Return the unix time of the last typing at a terminal, also over ssh; None if there is no terminal."""
    times = []
    for pattern in TERMINALS:
        for path in Path("/").glob(pattern):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_atime)
    return max(times, default=None)


class Lookout:
    """Observer of this machine; it looks only at what the rules need. Call it on a thread: it may block for some
    milliseconds."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._busy = _BusyTime(self._own)
        self._idle = IdleDetection()
        self._cards: Cards | None = None  # opened at first use
        self._metered = Rarely(is_metered)

    def __call__(self, rules: Rules) -> Surroundings:
        """Return the time and the present observations that `rules` need; the others are None or empty."""
        processes = psutil.process_iter(["name"]) if rules.exclusive else ()
        return Surroundings(
            when=datetime.datetime.now(),  # local time, which hours are in
            idle_s=self._idle.idle_s() if rules.only_idle_s is not None else None,
            others_load=self._busy.of_others() if rules.max_others_load is not None else None,
            programs=frozenset(name for each in processes if (name := each.info["name"])),
            on_mains=_on_mains() if rules.on_mains else None,
            memory_pressure=memory_pressure() if rules.max_memory_pressure is not None else None,
            metered=self._metered() if rules.unmetered else None,
            others_gpu_bytes=self._asked_cards().others_bytes() if rules.max_others_gpu_bytes is not None else None,
            others_gpu_load=self._asked_cards().others_load() if rules.max_others_gpu_load is not None else None,
        )

    def _asked_cards(self) -> Cards:
        self._cards = self._cards or Cards()
        return self._cards


class _BusyTime:
    """CPU time of the whole machine, and of this process with its children, between two calls."""

    def __init__(self, own: psutil.Process) -> None:
        self._own = own
        self._last = self._now()

    def of_others(self) -> float | None:
        """Return the share of all CPUs that other programs used since the last call; None if no time has passed."""
        now = self._now()
        all_s, busy_s, own_s = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        return min(1.0, max(0.0, busy_s - own_s) / all_s) if all_s > 0 else None  # idle time may count backwards

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        guest_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # also counted in user and nice
        all_s = sum(times) - guest_s
        total_s = 0.0
        for process in (self._own, *self._own.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                total_s += used.user + used.system
        return all_s, all_s - idle_s, total_s


def _on_mains() -> bool | None:
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return None if battery is None else battery.power_plugged


def memory_pressure(path: Path = PRESSURE) -> float | None:
    """Return the share of the last ten seconds that some process waited for memory (PSI); None if the kernel does not
    report it."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        kind, *fields = path.read_text().split("\n", 1)[0].split()
        values = dict(field.split("=", 1) for field in fields)
        return float(values["avg10"]) / 100 if kind == "some" else None
    return None


def is_metered(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> bool | None:
    """Return whether NetworkManager takes the connection for metered; None if it does not know or is not there."""
    name = "org.freedesktop.NetworkManager"
    command = ["busctl", "get-property", name, "/org/freedesktop/NetworkManager", name, "Metered"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout
        return METERED.get(told.removeprefix("u ").strip())
    return None
