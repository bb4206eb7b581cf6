"""Energy drawn by the cards of this machine while its nodes ran: today, and in total."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from swarmnode.net.tasks import OnCrash, Tasks
from swarmnode.swarm.storage.small_files import read_kept, try_to_keep

FILE = "energy.json"
MAX_FILE_BYTES = 4096
LOOK_S = 60.0
RUNNING_S = 3 * LOOK_S  # a longer gap means that no node ran in between
JOULES_PER_KWH = 3.6e6


class Energy(NamedTuple):
    """Energy drawn today and in total, in joules."""

    today_j: float
    total_j: float

    def __str__(self) -> str:
        return f"{self.today_j / JOULES_PER_KWH:.2f} kWh today, {self.total_j / JOULES_PER_KWH:.2f} kWh in all"


class _Kept(msgspec.Struct, frozen=True):
    day: str = ""  # 2026-11-22
    today_j: float = 0.0
    total_j: float = 0.0
    counter_j: float = 0.0  # the driver's counter at the last look
    at: float = 0.0  # unix time, seconds


class EnergySensors(Protocol):
    """Counter of energy."""

    def joules(self) -> float | None:
        """Return the joules drawn by all cards since some moment, such as the driver's start; None if no card reports
        it."""


class EnergyMeter:
    """Count of the energy drawn, from `start` to `close`.

    All nodes of a home count into one file: each adds the energy drawn since the last look of any node.
    """

    def __init__(
        self,
        home: Path,
        sensors: Callable[[], EnergySensors],
        *,
        now: Callable[[], float] = time.time,
        on_crash: OnCrash | None = None,
    ) -> None:
        self._path = home / FILE
        self._sensors = sensors
        self._now = now
        self._tasks = Tasks("energy", on_crash=on_crash)

    def __repr__(self) -> str:
        return f"<EnergyMeter {self._path}>"

    @classmethod
    def start(cls, home: Path, sensors: Callable[[], EnergySensors], *, on_crash: OnCrash | None) -> EnergyMeter:
        """Return a meter that counts from now on, if a card reports its energy."""
        meter = cls(home, sensors, on_crash=on_crash)
        meter._tasks.spawn(meter._watch(), "watch")
        return meter

    async def close(self) -> None:
        """Stop counting."""
        await self._tasks.close()

    async def _watch(self) -> None:
        sensors = await asyncio.to_thread(self._sensors)
        while (counter_j := await asyncio.to_thread(sensors.joules)) is not None:
            await asyncio.to_thread(self.look, counter_j)
            await asyncio.sleep(LOOK_S)

    def look(self, counter_j: float) -> None:
        """Add the energy drawn since the last look; nothing after a gap over `RUNNING_S` or if the driver's counter began anew."""
        kept, now = read_kept(self._path, _Kept, max_bytes=MAX_FILE_BYTES) or _Kept(), self._now()
        went_on = 0 <= now - kept.at <= RUNNING_S and counter_j >= kept.counter_j
        drawn_j, day = (counter_j - kept.counter_j if went_on else 0.0), _day(now)
        today_j = drawn_j + (kept.today_j if day == kept.day else 0.0)
        try_to_keep(self._path, _Kept(day, today_j, kept.total_j + drawn_j, counter_j, now), "what the cards draw is")


def energy_used(home: Path, now: Callable[[], float] = time.time) -> Energy | None:
    """Return the energy counted in this home; None if no card has reported any."""
    kept = read_kept(home / FILE, _Kept, max_bytes=MAX_FILE_BYTES)
    return None if kept is None else Energy(kept.today_j if kept.day == _day(now()) else 0.0, kept.total_j)


def _day(unix_s: float) -> str:
    return datetime.date.fromtimestamp(unix_s).isoformat()  # local date, as the owner reads it
