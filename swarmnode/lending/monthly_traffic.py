"""What a node has sent and received in a month, which may begin on another day than the first, over restarts."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import msgspec

from swarmnode.swarm.storage.kept_file import read_kept, try_to_keep

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
