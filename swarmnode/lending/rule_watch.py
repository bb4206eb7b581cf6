"""Rule watch: pauses and resumes a node by its rules and shows that on the owner's desktop. It counts the month's traffic for the
rule that limits it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import html
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from swarmnode.lending.idle_detection import Lookout
from swarmnode.lending.lending import OWNER, RULES, Lending, Rules, Surroundings, reason_to_pause
from swarmnode.net.tasks import Tasks
from swarmnode.swarm.storage.small_files import read_kept, try_to_keep

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
        self._kept = read_kept(self._path, _Months, max_bytes=MAX_FILE_BYTES) or _Months()
        self._month = month_of(today(), first_day())
        self._unkept_bytes = 0

    def __call__(self) -> int:
        """Return the bytes of this month until now."""
        moved, self._month = self._moved(), month_of(self._today(), self._first_day())
        fresh_bytes, self._counted = moved - self._counted, moved
        counted = self._kept.bytes
        begun = self._month not in counted
        counted[self._month] = counted.get(self._month, 0) + fresh_bytes
        self._unkept_bytes += fresh_bytes
        if begun or self._unkept_bytes >= KEEP_BYTES:
            self.keep()
        return counted[self._month]

    def keep(self) -> None:
        """Drop the oldest months beyond `MONTHS`, and write the counts. A failure is logged."""
        self._unkept_bytes = 0
        for month in sorted(self._kept.bytes.keys() - {self._month})[: 1 - MONTHS]:
            del self._kept.bytes[month]
        try_to_keep(self._path, self._kept, "the month's traffic is")


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
        commands = (
            [
                "busctl",
                "--user",
                "call",
                name,
                "/org/freedesktop/Notifications",
                name,
                "Notify",
                "susssasa{sv}i",
                *notice,
            ],
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

    `look` returns observations for the rules; it may block, and is called on a thread. `month_bytes` returns this
    month's traffic. `show` gets a title and a text at each pause and resume that the rules cause.
    """

    def __init__(
        self,
        lending: Lending,
        look: Callable[[Rules], Surroundings],
        *,
        month_bytes: Callable[[], int] = lambda: 0,
        show: Callable[[str, str], None] = _show_nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lending = lending
        self._look = look
        self._show = show
        self._month_bytes = month_bytes
        self._clock = clock
        self._broken_s: float | None = None  # time of the last violation; None after a resume

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            if self._broken_s is None:
                await self._lending.ruled()
            self.judge(await asyncio.to_thread(self._look, self._lending.rules))
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
        month.keep()
        await notices.close()
