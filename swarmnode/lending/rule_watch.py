"""Rule watch: pauses and resumes a node by its rules and shows that on the owner's desktop. It counts the month's traffic for the
rule that limits it.

Idle detection and the other observations of this machine that rules need; and giving way to other programs.

The idle time follows from the desktop's reports to logind and from typing at terminals.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import html
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import psutil

from swarmnode.lending.cards import Cards
from swarmnode.lending.lending import OWNER, RULES, Lending, Rules, Surroundings, reason_to_pause
from swarmnode.metrics.machine import cpu_seconds
from swarmnode.net.tasks import Tasks
from swarmnode.swarm.storage.small_files import read_stored, try_to_keep

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
        touched = [idle_since] if (idle_since := self._idle_since()) is not None else []
        for pattern in TERMINALS:  # also those of ssh
            for path in Path("/").glob(pattern):
                with contextlib.suppress(OSError):
                    touched.append(path.stat().st_atime)  # the last typing
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
        total_s = 0.0
        for process in (self._own, *self._own.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                total_s += used.user + used.system
        return *cpu_seconds(), total_s


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


LOOK_S = 1.0
CALM_S = 20.0  # without a violation before lending resumes: a film has quiet moments
FILE = "month.json"
MAX_FILE_BYTES = 4096
MONTHS = 4  # months in the file
KEEP_BYTES = 100_000_000  # the file is written after this much more traffic
SESSION_BUS = "DBUS_SESSION_BUS_ADDRESS"
NOTICE_S = 2.0  # longest wait for the desktop
SHOWN_MS = 10_000


class _Months(msgspec.Struct):
    """Traffic by month. Several months are kept, so that a clock that jumps away and back loses no count."""

    bytes: dict[str, int] = {}  # by month, as 2026-11; msgspec gives each instance its own


class MonthlyTraffic:
    """Counter of the traffic of the present month. `moved` returns the bytes sent and received over the links since the
    start."""

    def __init__(
        self,
        home: Path,
        moved: Callable[[], int],
        *,
        first_day: Callable[[], int] = lambda: 1,
        today: Callable[[], datetime.date] = datetime.date.today,
    ) -> None:
        self._path = home / FILE
        self._moved = moved
        self._first_day = first_day
        self._today = today
        self._counted = moved()
        self._stored = read_stored(self._path, _Months, max_bytes=MAX_FILE_BYTES) or _Months()
        self._month = month_of(today(), first_day())
        self._unkept_bytes = 0

    def __call__(self) -> int:
        """Return the bytes of this month until now."""
        moved, self._month = self._moved(), month_of(self._today(), self._first_day())
        fresh_bytes, self._counted = moved - self._counted, moved
        counted = self._stored.bytes
        begun = self._month not in counted
        counted[self._month] = counted.get(self._month, 0) + fresh_bytes
        self._unkept_bytes += fresh_bytes
        if begun or self._unkept_bytes >= KEEP_BYTES:
            self.store()
        return counted[self._month]

    def store(self) -> None:
        """Drop the oldest months beyond `MONTHS`, and write the counts. A failure is logged."""
        self._unkept_bytes = 0
        for month in sorted(self._stored.bytes.keys() - {self._month})[: 1 - MONTHS]:
            del self._stored.bytes[month]
        try_to_keep(self._path, self._stored, "the month's traffic is")


def month_of(day: datetime.date, first_day: int) -> str:
    """Return the month of a day as `2026-11`, where a month begins on `first_day`. It is named by the calendar month of
    its first day."""
    began = day if day.day >= first_day else day.replace(day=1) - datetime.timedelta(days=1)
    return f"{began:%Y-%m}"


class DesktopNotices:
    """Notices on the owner's desktop, by the session bus that `SESSION_BUS` names. Each one sent by busctl replaces
    the one before; notify-send only adds one.

    Without a session bus, or a desktop that answers there, nothing is shown.
    """

    def __init__(self, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> None:
        self._run = run
        self._tasks = Tasks("desktop notices", on_crash=None)
        self._in_turn = asyncio.Lock()
        self._shown = "0"  # id of the latest notice

    def show(self, title: str, text: str) -> None:
        """Show a notice in the background."""
        if os.environ.get(SESSION_BUS):
            self._tasks.spawn(self._show(title, text), title)

    async def idle(self) -> None:
        """Wait until every notice has been shown or given up."""
        await self._tasks.idle()

    async def close(self) -> None:
        """Give up the notices that are on the way."""
        await self._tasks.close()

    async def _show(self, title: str, text: str) -> None:
        async with self._in_turn:
            await asyncio.to_thread(self._send, title, html.escape(text, quote=False))

    def _send(self, title: str, text: str) -> None:
        """Send a notice by the first program that succeeds (https://specifications.freedesktop.org/notification-spec)."""
        name = "org.freedesktop.Notifications"
        notice = ("swarmnode", self._shown, "", title, text, "0", "0", str(SHOWN_MS))
        call = f"busctl --user call {name} /org/freedesktop/Notifications {name} Notify susssasa{{sv}}i"
        commands = (
            [*call.split(), *notice],
            ["notify-send", "--app-name=swarmnode", f"--expire-time={SHOWN_MS}", "--", title, text],
        )
        for command in commands:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                told = self._run(command, capture_output=True, text=True, timeout=NOTICE_S, check=True).stdout
                if told.startswith("u "):
                    self._shown = told.removeprefix("u ").strip()
                return


def _show_nothing(_title: str, _text: str) -> None:
    """Discard a notice."""


class RuleWatch:
    """Watch over a node's rules.

    `observe` returns observations for the rules; it may block, and is called on a thread. `month_bytes` returns this
    month's traffic. `show` gets a title and a text at each pause and resume that the rules cause.
    """

    def __init__(
        self,
        lending: Lending,
        observe: Callable[[Rules], Surroundings],
        *,
        month_bytes: Callable[[], int] = lambda: 0,
        show: Callable[[str, str], None] = _show_nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lending = lending
        self._observe = observe
        self._show = show
        self._month_bytes = month_bytes
        self._clock = clock
        self._broken_s: float | None = None  # time of the last violation; None after a resume

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            if self._broken_s is None:
                await self._lending.ruled()
            self.judge(await asyncio.to_thread(self._observe, self._lending.rules))
            await asyncio.sleep(LOOK_S)

    def judge(self, seen: Surroundings) -> None:
        """Pause lending at once if an observation violates a rule; resume it after `CALM_S` without violations."""
        reason = reason_to_pause(self._lending.rules, replace(seen, month_bytes=self._month_bytes()))
        now_s = self._clock()
        owner_holds = self._lending.wants_pause(OWNER)
        if reason:
            if self._broken_s is None and not owner_holds:
                self._show("swarmnode has paused", f"Reason: {reason}. It lends again when its rules allow it.")
            self._broken_s = now_s
            self._lending.pause(reason, by=RULES)
        elif self._broken_s is not None and now_s - self._broken_s >= CALM_S:
            self._broken_s = None
            self._lending.resume(by=RULES)
            if not owner_holds:
                self._show("swarmnode lends again", "Its rules allow it now.")


async def follow_rules(
    lending: Lending,
    home: Path,
    moved: Callable[[], int],
    *,
    notify: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Pause and resume a node by its rules, until cancelled, and show that on the desktop if `notify` is true. `moved` returns the
    bytes sent and received over its links."""
    month = MonthlyTraffic(home, moved, first_day=lambda: lending.rules.month_day)
    notices = DesktopNotices()
    show = notices.show if notify else _show_nothing
    try:
        await RuleWatch(lending, Lookout(), month_bytes=month, show=show, clock=clock).run()
    finally:
        month.store()
        await notices.close()
