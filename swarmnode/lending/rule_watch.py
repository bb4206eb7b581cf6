"""Watch over a node's rules, which pauses and resumes its lending, and the count of a month's traffic that a rule may bound."""

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
CALM_S = 20.0  # for so long nothing must speak against lending before it goes on: a film has quiet moments
FILE = "month.json"
MAX_FILE_BYTES = 4096
MONTHS = 4  # that are remembered
KEEP_BYTES = 100_000_000  # after so many more it is written


class _Months(msgspec.Struct):
    """More than the one that it is now: where the clock jumps away and back again, what was counted still counts."""

    bytes: dict[str, int] = {}  # of each month, as 2026-11; msgspec gives each its own


class MonthlyTraffic:
    """`moved` says what has gone over the links since the start, in bytes."""

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
        """Bytes of this month so far."""
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
        """Write it down, if that can be."""
        self._unkept_bytes = 0
        for month in sorted(self._kept.bytes.keys() - {self._month})[: 1 - MONTHS]:
            del self._kept.bytes[month]
        try_to_keep(self._path, self._kept, "the month's traffic is")


def month_of(day: datetime.date, first_day: int) -> str:
    """The month that a day belongs to, by the calendar month in which that began: `2026-11`."""
    began = day if day.day >= first_day else day.replace(day=1) - datetime.timedelta(days=1)
    return f"{began:%Y-%m}"


class RuleWatch:
    """`look` may block, and is called on a thread; `month_bytes` says what was sent and received this month."""

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
        self._broken_s: float | None = None  # when a rule last spoke against lending

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
        """Act on what was seen: pause at once, resume after a calm while."""
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
    """Let the rules of the time pause and resume a node, for ever. `moved` says how many bytes have gone over its links."""
    month = MonthlyTraffic(home, moved, first_day=lambda: lending.rules.month_day)
    try:
        await RuleWatch(lending, Lookout(), month_bytes=month, clock=clock).run()
    finally:
        month.keep()
