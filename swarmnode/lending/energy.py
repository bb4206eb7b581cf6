"""What the cards of this machine have drawn while its nodes ran: today, and in all."""

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
RUNNING_S = 3 * LOOK_S  # after a longer pause no node has run in between
JOULES_PER_KWH = 3.6e6


class Energy(NamedTuple):
    """In joules."""

    today_j: float
    total_j: float

    def __str__(self) -> str:
        return f"{self.today_j / JOULES_PER_KWH:.2f} kWh today, {self.total_j / JOULES_PER_KWH:.2f} kWh in all"


class _Kept(msgspec.Struct, frozen=True):
    day: str = ""  # 2026-11-22
    today_j: float = 0.0
    total_j: float = 0.0
    counter_j: float = 0.0  # of the driver's, as it was
    at: float = 0.0  # unix time, seconds


class EnergySensors(Protocol):
    """What counts."""

    def joules(self) -> float | None:
        """Drawn by all cards since some moment, the driver's start perhaps; None where no card tells it."""


class EnergyMeter:
    """From `start` to `close`. All nodes of a home count into one file, each what was drawn since any of them looked."""

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
        """One that counts from now on, where a card tells."""
        meter = cls(home, sensors, on_crash=on_crash)
        meter._tasks.spawn(meter._watch(), "watch")
        return meter

    async def close(self) -> None:
        """Stop."""
        await self._tasks.close()

    async def _watch(self) -> None:
        sensors = await asyncio.to_thread(self._sensors)
        while (counter_j := await asyncio.to_thread(sensors.joules)) is not None:
            await asyncio.to_thread(self.look, counter_j)
            await asyncio.sleep(LOOK_S)

    def look(self, counter_j: float) -> None:
        """Take in what the driver has counted."""
        kept, now = read_kept(self._path, _Kept, max_bytes=MAX_FILE_BYTES) or _Kept(), self._now()
        went_on = 0 <= now - kept.at <= RUNNING_S and counter_j >= kept.counter_j
        drawn_j, day = (counter_j - kept.counter_j if went_on else 0.0), _day(now)
        today_j = drawn_j + (kept.today_j if day == kept.day else 0.0)
        try_to_keep(self._path, _Kept(day, today_j, kept.total_j + drawn_j, counter_j, now), "what the cards draw is")


def energy_used(home: Path, now: Callable[[], float] = time.time) -> Energy | None:
    """What was counted; None where no card of this machine has told anything yet."""
    kept = read_kept(home / FILE, _Kept, max_bytes=MAX_FILE_BYTES)
    return None if kept is None else Energy(kept.today_j if kept.day == _day(now()) else 0.0, kept.total_j)


def _day(unix_s: float) -> str:
    return datetime.date.fromtimestamp(unix_s).isoformat()  # of the wall, as its owner reads it
