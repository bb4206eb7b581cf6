"""A volunteer's announced speed: measured when it first holds a span of a size, then corrected by real work.

Measured speeds are kept in a file, so that they are announced at once after a restart. They are only the peer's own claim, for its
first sessions; after that the measurements of its neighbours count (`peer/paths.py`).
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch
from msgspec import UNSET

from swarmnode.compute.capacity.capacity import Speeds
from swarmnode.swarm.records.announcement import MAX_PARALLEL_SPEEDUP, WorkSpeeds
from swarmnode.swarm.storage.small_files import read_stored, try_to_keep
from swarmnode.version import __version__

log = logging.getLogger(__name__)

MAX_ENTRIES = 64
MAX_FILE_BYTES = 1 << 16
OLD_S = 30 * 86400.0  # drivers, thermal paste and neighbours change: measure anew
DEPARTURE = 1.25  # factor between announced and real speed beyond which a new one is announced
DEPARTED_S = 30.0  # seconds that the factor must last, and
DEPARTED_PASSES = 20  # passes that it must last
NEWEST = 0.1  # weight of the newest pass


@dataclass(frozen=True)
class Conditions:
    """Conditions of a measured speed. If one of them changes, the speed is measured anew."""

    model: str  # the swarm's id in hex
    device: str
    memory_bytes: int  # of the device
    number_format: str  # dtype and quantisation
    threads: int
    units: int
    throttle: float = 0.0
    share: float = 1.0

    @property
    def but_size(self) -> str:
        """Text of all conditions except the size of the span, with the versions of the software."""
        versions = f"swarmnode {__version__}, torch {torch.__version__}, python {platform.python_version()}"
        own = (self.model, self.device, self.memory_bytes, self.number_format, self.threads, self.throttle, self.share)
        return "; ".join(map(str, (*own, versions, "")))

    @property
    def key(self) -> str:
        """Text of all conditions, in one line."""
        return f"{self.but_size}{self.units}"

    def distance(self, units: int) -> int:
        """Return the difference between `units` and the size of this span."""
        return abs(units - self.units)


class _Entry(msgspec.Struct, frozen=True):
    measured_at: float  # unix time, seconds
    speeds: Speeds


class SpeedCache:
    """Bounded file of measured speeds, by conditions. If it is missing or damaged it counts as empty: speeds are measured anew
    then."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self.path = path
        self._now = now
        self._entries = self._read()

    def find(self, conditions: Conditions) -> Speeds | None:
        """Return the speeds measured under these conditions; None if there are none, or they are too old."""
        entry = self._entries.get(conditions.key)
        return entry.speeds if entry is not None and self._is_fresh(entry) else None

    def nearest(self, conditions: Conditions) -> Speeds:
        """Return the speeds measured on a span of the most similar size under otherwise equal conditions; zeros if there are
        none."""
        known = self._by_size(conditions)
        return known[min(known, key=conditions.distance)].speeds if known else Speeds()

    def newest(self, conditions: Conditions) -> Speeds:
        """Return the speeds measured last on a span of any size under otherwise equal conditions; zeros if there are none."""
        known = self._by_size(conditions)
        return max(known.values(), key=lambda entry: entry.measured_at).speeds if known else Speeds()

    def _by_size(self, conditions: Conditions) -> dict[int, _Entry]:
        """Return the entries that are not too old, by the number of units, under otherwise equal conditions."""
        return {
            int(key.rpartition("; ")[2]): entry
            for key, entry in self._entries.items()
            if key.startswith(conditions.but_size) and self._is_fresh(entry)
        }

    def _is_fresh(self, entry: _Entry) -> bool:
        return self._now() - entry.measured_at <= OLD_S

    def put(self, conditions: Conditions, speeds: Speeds) -> None:
        """Keep a measurement; the oldest gives way. If the file cannot be written, only later runs lack it."""
        self._entries = {**self._entries, **self._read()}  # other nodes of this home write the file, too
        self._entries[conditions.key] = _Entry(self._now(), speeds)
        newest = sorted(self._entries.items(), key=lambda item: -item[1].measured_at)[:MAX_ENTRIES]
        self._entries = dict(newest)
        try_to_keep(self.path, self._entries, "measured speeds are")

    def _read(self) -> dict[str, _Entry]:
        return read_stored(self.path, dict[str, _Entry], max_bytes=MAX_FILE_BYTES) or {}


class Drift:
    """Comparison of one announced speed with real work, which gives a new speed to announce once both differ for long."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unit_s = 0.0  # a moving average
        self._passes = 0  # passes, and since when, that the average differs from the announced speed
        self._since_s = 0.0

    def record(self, unit_s: float, announced_units_per_s: float) -> float | None:
        """Take the seconds per unit of a pass of real work. Returns the speed to announce from now on; None if the announced one
        stays.

        A pass of no time, as a coarse clock may show it, is ignored.
        """
        if unit_s <= 0:
            return None
        if not announced_units_per_s:
            return 1 / unit_s
        self._unit_s = (1 - NEWEST) * self._unit_s + NEWEST * unit_s if self._unit_s else unit_s
        ratio = announced_units_per_s * self._unit_s
        if 1 / DEPARTURE <= ratio <= DEPARTURE:
            self._passes = 0
            return None
        if self._passes == 0:
            self._since_s = self._clock()
        self._passes += 1
        if self._passes < DEPARTED_PASSES or self._clock() - self._since_s < DEPARTED_S:
            return None
        self._passes = 0
        return 1 / self._unit_s


class Capability:
    """The speeds that a stage announces. Passes are noted on its compute thread and read on the event loop."""

    def __init__(
        self,
        speeds: Speeds,
        conditions: Conditions,
        cache: SpeedCache,
        *,
        lasting: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.speeds = speeds
        self.lasting = lasting
        self._conditions = conditions
        self._cache = cache
        self._drift = {field: Drift(clock=clock) for field in Speeds.__dataclass_fields__}

    @classmethod
    def of(
        cls,
        conditions: Conditions,
        cache: SpeedCache,
        measure: Callable[[], Speeds],
        *,
        lasting: bool = True,
        **clock: Any,
    ) -> Capability:
        """Return the capability with the cached speeds, or else with speeds measured now (on the calling thread), and kept if
        `lasting`."""
        speeds = cache.find(conditions)
        if speeds is not None:
            return cls(speeds, conditions, cache, **clock)
        capability = cls(Speeds(), conditions, cache, lasting=lasting, **clock)
        capability.measure(measure, lasting=lasting)
        return capability

    def measure(self, measure: Callable[[], Speeds], *, lasting: bool = True) -> None:
        """Measure speeds now (on the calling thread) and announce them; keep them if `lasting`."""
        self.speeds, self.lasting = measure(), lasting
        if lasting:
            self._cache.put(self._conditions, self.speeds)

    def correct(self, field: str, units_per_s: float) -> None:
        """Announce the speed of a trial under current conditions at once, if it differs from the announced one by more than
        DEPARTURE."""
        announced = getattr(self.speeds, field)
        if not announced / DEPARTURE <= units_per_s <= announced * DEPARTURE:
            self._announce(field, units_per_s)

    def record(self, field: str, unit_s: float) -> None:
        """Take the seconds per unit and position of a pass of real work; `field` names the speed."""
        speed = self._drift[field].record(unit_s, getattr(self.speeds, field))
        if speed is not None:
            self._announce(field, speed)

    def _announce(self, field: str, units_per_s: float) -> None:
        log.info("work here shows %s of %.1f instead of %.1f", field, units_per_s, getattr(self.speeds, field))
        changed = {field: units_per_s}
        if field == "decode_units_per_s" and self.speeds.decode_units_per_s:  # what slows single steps slows pairs
            changed["pair_units_per_s"] = self.speeds.pair_units_per_s * units_per_s / self.speeds.decode_units_per_s
        self.speeds = replace(self.speeds, **changed)
        self._cache.put(self._conditions, self.speeds)

    def section(self) -> WorkSpeeds:
        """Return the section for the announcement; unmeasured speeds are left out."""
        return speeds_section(self.speeds)


def _by_field(figure: Callable[[str], float]) -> Speeds:
    return Speeds(**{field: figure(field) for field in Speeds.__dataclass_fields__})


def in_sequence(parts: Iterable[tuple[int, Speeds]]) -> Speeds:
    """Return the speeds of (units, speeds) on devices in sequence: a position takes the time of all of them. 0 for a speed that one
    device lacks."""
    held = list(parts)

    def one_behind_another(field: str) -> float:
        pairs = [(count, float(getattr(speeds, field))) for count, speeds in held]
        measured = all(speed for _, speed in pairs)
        return sum(count for count, _ in pairs) / sum(count / speed for count, speed in pairs) if measured else 0.0

    return _by_field(one_behind_another)


def at_once(replicas: Iterable[Iterable[tuple[int, Speeds]]]) -> Speeds:
    """Return the speeds of replicas, each of (units, speeds) on devices in sequence, with work for all devices at the same time.

    The slowest device of a replica decides, and replicas add up. 0 for a speed that one device lacks.
    """
    held = [list(replica) for replica in replicas]

    def together(field: str) -> float:
        speeds = [[(count, float(getattr(one, field))) for count, one in replica] for replica in held]
        if not all(speed for replica in speeds for _, speed in replica):
            return 0.0
        return sum(
            sum(count for count, _ in replica) / max(count / speed for count, speed in replica) for replica in speeds
        )

    return _by_field(together)


def serving_section(replicas: Sequence[Sequence[tuple[int, Speeds]]]) -> WorkSpeeds:
    """Return the section for the announcement of replicas, each of (units, speeds).

    It has the speed of one session alone, as the mean over the replicas, and the factor that several sessions gain together on
    different devices.
    """
    each, together = list(map(in_sequence, replicas)), at_once(replicas)
    alone = _by_field(lambda field: fmean(getattr(speeds, field) for speeds in each))
    speedup = together.decode_units_per_s / alone.decode_units_per_s if alone.decode_units_per_s else 1.0
    section = speeds_section(alone)
    return msgspec.structs.replace(section, parallel_speedup=min(max(speedup, 1.0), MAX_PARALLEL_SPEEDUP))


def speeds_section(speeds: Speeds) -> WorkSpeeds:
    """Return the section for the announcement of these speeds; unmeasured ones are left out."""
    return WorkSpeeds(
        decode_units_per_s=speeds.decode_units_per_s or UNSET,
        prefill_units_per_s=speeds.prefill_units_per_s or UNSET,
        training_units_per_s=speeds.training_units_per_s or UNSET,
        pair_units_per_s=speeds.pair_units_per_s or UNSET,
    )
