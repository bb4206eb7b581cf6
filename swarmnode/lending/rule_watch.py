"""Rule watch: pauses and resumes a node by its rules, and counts the month's traffic for the rule that limits it."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from swarmnode.lending.idle_detection import Lookout
from swarmnode.lending.lending import RULES, Lending
from swarmnode.lending.rules import Rules, Surroundings, reason_to_pause
from swarmnode.swarm.storage.small_files import read_kept, try_to_keep

LOOK_S = 1.0
CALM_S = 20.0  # without a violation before lending resumes: a film has quiet moments
FILE = "month.json"
MAX_FILE_BYTES = 4096
MONTHS = 4  # months in the file
KEEP_BYTES = 100_000_000  # the file is written after this much more traffic


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

    def __repr__(self) -> str:
        return f"<MonthlyTraffic {self._kept.bytes.get(self._month, 0) / 1e9:.3f} GB in {self._month}>"

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


class RuleWatch:
    """Watch over a node's rules.

    `look` returns observations for the rules; it may block, and is called on a thread. `month_bytes` returns this
    month's traffic.
    """

    def __init__(
        self,
        lending: Lending,
        look: Callable[[Rules], Surroundings],
        *,
        month_bytes: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lending = lending
        self._look = look
        self._month_bytes = month_bytes
        self._clock = clock
        self._broken_s: float | None = None  # time of the last violation; None after a resume

    def __repr__(self) -> str:
        return f"<RuleWatch {self._lending.rules} of {self._lending!r}>"

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
        if reason:
            self._broken_s = now_s
            self._lending.pause(reason, by=RULES)
        elif self._broken_s is not None and now_s - self._broken_s >= CALM_S:
            self._broken_s = None
            self._lending.resume(by=RULES)


async def follow_rules(
    lending: Lending, home: Path, moved: Callable[[], int], *, clock: Callable[[], float] = time.monotonic
) -> None:
    """Pause and resume a node by its rules, until cancelled. `moved` returns the bytes sent and received over its
    links."""
    month = MonthlyTraffic(home, moved, first_day=lambda: lending.rules.month_day)
    try:
        await RuleWatch(lending, Lookout(), month_bytes=month, clock=clock).run()
    finally:
        month.keep()
