"""NVIDIA cards of this machine: temperature, power and use by other programs, and the guard that keeps them under
ceilings.

Energy drawn by the cards of this machine while its nodes ran: today, and in total.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import msgspec
import psutil

from swarmnode.metrics.machine import nvidia_cards
from swarmnode.net.tasks import OnCrash, Tasks
from swarmnode.swarm.storage.small_files import read_stored, try_to_keep

LOOK_S = 1.0
LEAST_SHARE = 0.05
DOWN, UP = 0.8, 1.05  # down at once, up slowly: a card stays warm for a while
ROOM = 0.97  # share of a ceiling; above it no card speeds up


@dataclass(frozen=True)
class CardLimits:
    """Ceilings of temperature and power for a card. None is no ceiling."""

    max_celsius: float | None = None
    max_watts: float | None = None

    @property
    def any(self) -> bool:
        """Whether there is a ceiling."""
        return self != CardLimits()

    def strain(self, celsius: float | None, watts: float | None) -> float:
        """Return how near the card is to its ceilings; 1 is at a ceiling. A ceiling without a measurement does not
        count."""
        pairs = (celsius, self.max_celsius), (watts, self.max_watts)
        return max((now / most for now, most in pairs if now is not None and most is not None), default=0.0)


class Paced(Protocol):
    """Device that can be made to rest. `share` is the share of the time that it works, 0 to 1."""

    share: float


class Sensors(Protocol):
    """Sensors of temperature and power of the cards."""

    def celsius(self) -> float | None:
        """Return the temperature of the hottest card in degrees Celsius; None if it is not known."""

    def watts(self) -> float | None:
        """Return the power of the card that draws most, in watts; None if it is not known."""


def next_share(share: float, most: float, strain: float) -> float:
    """Return the next share of the time for a device that had `share`. Its owner lends at most `most`."""
    if strain > 1:
        return max(min(LEAST_SHARE, most), share * DOWN)
    return min(most, share * UP) if strain < ROOM else share


class CardGuard:
    """Guard that reads the sensors every second, from `start` to `close`, and slows all `paced` devices for the hottest
    card."""

    def __init__(
        self,
        limits: CardLimits,
        paced: Sequence[Paced],
        sensors: Callable[[], Sensors],
        *,
        on_crash: OnCrash | None = None,
    ) -> None:
        self._limits = limits
        self._paced = paced
        self._most = paced[0].share
        self._sensors = sensors
        self._is_watching = False  # from the first ceiling on
        self._tasks = Tasks("card guard", on_crash=on_crash)

    @classmethod
    def start(
        cls, limits: CardLimits, paced: Sequence[Paced], sensors: Callable[[], Sensors], *, on_crash: OnCrash | None
    ) -> CardGuard:
        """Return a guard that watches from now on, if there is a ceiling."""
        guard = cls(limits, paced, sensors, on_crash=on_crash)
        guard.follow(limits)
        return guard

    def follow(self, limits: CardLimits) -> None:
        """Replace the ceilings. Devices that were slowed speed up again if they may."""
        self._limits = limits
        if limits.any and not self._is_watching:
            self._is_watching = True
            self._tasks.spawn(self._watch(), "watch")

    async def close(self) -> None:
        """Stop watching."""
        await self._tasks.close()

    async def _watch(self) -> None:
        sensors = await asyncio.to_thread(self._sensors)
        while True:
            celsius, watts = await asyncio.to_thread(lambda: (sensors.celsius(), sensors.watts()))
            self.judge(celsius, watts)
            await asyncio.sleep(LOOK_S)

    def judge(self, celsius: float | None, watts: float | None) -> None:
        """Set the share of the devices for this temperature and power."""
        share = next_share(self._paced[0].share, self._most, self._limits.strain(celsius, watts))
        for paced in self._paced:
            paced.share = share


class Cards:
    """All NVIDIA cards; none if there is no driver. Methods may block for a while.

    A figure that the driver does not report (power, on many laptops) is None.
    """

    def __init__(self) -> None:
        self._nvml, self._handles = nvidia_cards()
        self._sampled_us: dict[int, int] = {}  # by card: the driver's time of the last sample read

    def celsius(self) -> float | None:
        """Return the temperature of the hottest card in degrees Celsius; None if no card reports it."""
        nvml = self._nvml
        return self._most(lambda handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))

    def watts(self) -> float | None:
        """Return the power of the card that draws most, in watts; None if no card reports it."""
        return self._most(lambda handle: self._nvml.nvmlDeviceGetPowerUsage(handle) / 1000)  # from milliwatts

    def joules(self) -> float | None:
        """Return the joules drawn by all cards since the driver was loaded; None if no card counts them (before Volta)."""
        # The driver counts millijoules.
        counted = self._figures(lambda handle: self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)
        return sum(counted) if counted else None

    def others_bytes(self) -> int | None:
        """Return the memory that other programs use on a card, for the card with the most; None if no card reports it."""
        own = _own_pids()
        most = self._most(lambda handle: sum(used for pid, used in self._programs(handle) if pid not in own))
        return None if most is None else int(most)

    def others_load(self) -> float | None:
        """Return the share of the time since the last call that a card computed for other programs, for the card with
        the most.

        Returns None if no driver reports it (as under WSL).
        """
        own = _own_pids()
        loads = [load for card in range(len(self._handles)) if (load := self._others_load_on(card, own)) is not None]
        return max(loads, default=None)

    def _others_load_on(self, card: int, own: set[int]) -> float | None:
        nvml = self._nvml
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handles[card], self._sampled_us.get(card, 0))
        except nvml.NVMLError as error:
            # No program has computed since, or the driver cannot say.
            return 0.0 if isinstance(error, nvml.NVMLError_NotFound) else None
        self._sampled_us[card] = max((sample.timeStamp for sample in samples), default=self._sampled_us.get(card, 0))
        by_program: defaultdict[int, list[int]] = defaultdict(list)
        for sample in samples:
            by_program[sample.pid].append(sample.smUtil)  # percent
        return min(1.0, sum(fmean(used) for pid, used in by_program.items() if pid not in own) / 100)

    def _programs(self, handle: Any) -> Iterator[tuple[int, int]]:
        """Yield process id and memory of each program once, whether it computes, draws, or both."""
        nvml = self._nvml
        asked = nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses
        yield from {each.pid: each.usedGpuMemory or 0 for ask in asked for each in ask(handle)}.items()

    def _most(self, figure: Callable[[Any], float]) -> float | None:
        return max(self._figures(figure), default=None)

    def _figures(self, figure: Callable[[Any], float]) -> list[float]:
        """Return the figure for each card that reports it."""
        figures = []
        for handle in self._handles:
            try:
                figures.append(float(figure(handle)))
            except self._nvml.NVMLError:
                continue
        return figures


def _own_pids() -> set[int]:
    return {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}


FILE = "energy.json"
MAX_FILE_BYTES = 4096
MEASURE_S = 60.0
RUNNING_S = 3 * MEASURE_S  # a longer gap means that no node ran in between
JOULES_PER_KWH = 3.6e6


class Energy(NamedTuple):
    """Energy drawn today and in total, in joules."""

    today_j: float
    total_j: float

    def __str__(self) -> str:
        return f"{self.today_j / JOULES_PER_KWH:.2f} kWh today, {self.total_j / JOULES_PER_KWH:.2f} kWh in all"


class _StoredEnergy(msgspec.Struct, frozen=True):
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
            await asyncio.to_thread(self.record, counter_j)
            await asyncio.sleep(MEASURE_S)

    def record(self, counter_j: float) -> None:
        """Add the energy drawn since the last look; nothing after a gap over `RUNNING_S` or if the driver's counter began anew."""
        kept, now = read_stored(self._path, _StoredEnergy, max_bytes=MAX_FILE_BYTES) or _StoredEnergy(), self._now()
        went_on = 0 <= now - kept.at <= RUNNING_S and counter_j >= kept.counter_j
        drawn_j, day = (counter_j - kept.counter_j if went_on else 0.0), _day(now)
        today_j = drawn_j + (kept.today_j if day == kept.day else 0.0)
        try_to_keep(
            self._path, _StoredEnergy(day, today_j, kept.total_j + drawn_j, counter_j, now), "what the cards draw is"
        )


def energy_used(home: Path, now: Callable[[], float] = time.time) -> Energy | None:
    """Return the energy counted in this home; None if no card has reported any."""
    kept = read_stored(home / FILE, _StoredEnergy, max_bytes=MAX_FILE_BYTES)
    return None if kept is None else Energy(kept.today_j if kept.day == _day(now()) else 0.0, kept.total_j)


def _day(unix_s: float) -> str:
    return datetime.date.fromtimestamp(unix_s).isoformat()  # local date, as the owner reads it
