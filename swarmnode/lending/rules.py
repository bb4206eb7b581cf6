"""Rules for yielding the machine: pure functions over observations of it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass

from swarmnode.config import Size

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@dataclass(frozen=True)
class Hours:
    """Span of the day from `start` to `end`, over midnight if the end is not later."""

    start: datetime.time
    end: datetime.time

    def __str__(self) -> str:
        return f"{self.start:%H:%M}-{self.end:%H:%M}"

    def contain(self, when: datetime.time) -> bool:
        """Return whether a time lies in the span."""
        if self.start < self.end:
            return self.start <= when < self.end
        return when >= self.start or when < self.end


@dataclass(frozen=True)
class Rules:
    """Conditions under which a node lends; an unset rule does not count. CPU shares are of all CPUs, 0 to 1."""

    only_idle_s: float | None = None  # without keyboard or mouse input
    max_others_load: float | None = None  # largest share of the CPUs for other programs
    exclusive: frozenset[str] = frozenset()  # programs during which the node does not lend
    hours: Hours | None = None
    days: frozenset[int] = frozenset()  # 0 is Monday
    on_mains: bool = False
    max_memory_pressure: float | None = None  # largest share of the time that some program waits for memory
    monthly_bytes: Size = Size()  # sent and received, in a month
    month_day: int = 1  # first day of the month that counts
    unmetered: bool = False  # not on metered connections
    max_others_gpu_bytes: Size = Size()  # largest memory of a card for other programs
    max_others_gpu_load: float | None = None  # largest share of a card's time for other programs

    @property
    def any(self) -> bool:
        """Whether any rule is set."""
        return self != Rules(month_day=self.month_day)


@dataclass(frozen=True)
class Surroundings:
    """Observations of the machine. None is unknown, and violates no rule."""

    when: datetime.datetime
    idle_s: float | None = None
    others_load: float | None = None
    programs: frozenset[str] = frozenset()
    on_mains: bool | None = None
    memory_pressure: float | None = None
    month_bytes: int = 0
    metered: bool | None = None
    others_gpu_bytes: int | None = None
    others_gpu_load: float | None = None


def reason_to_pause(rules: Rules, seen: Surroundings) -> str:
    """Return the first reason not to lend now; empty if there is none."""
    return next(_reasons(rules, seen), "")


def _reasons(rules: Rules, seen: Surroundings) -> Iterator[str]:
    running = sorted(rules.exclusive & seen.programs)
    if running:
        yield f"{running[0]} is running"
    if rules.on_mains and seen.on_mains is False:
        yield "on battery"
    if rules.unmetered and seen.metered:
        yield "the connection is metered"
    if _over(seen.others_gpu_bytes, rules.max_others_gpu_bytes):
        yield "other programs need the card's memory"
    if _over(seen.others_gpu_load, rules.max_others_gpu_load):
        yield "other programs need the card"
    if _over(seen.memory_pressure, rules.max_memory_pressure):
        yield "other programs wait for memory"
    if rules.only_idle_s is not None and seen.idle_s is not None and seen.idle_s < rules.only_idle_s:
        yield "the machine is in use"
    if _over(seen.others_load, rules.max_others_load):
        yield "other programs need the CPU"
    if rules.hours is not None and not rules.hours.contain(seen.when.time()):
        yield f"it lends at {rules.hours} only"
    if rules.days and seen.when.weekday() not in rules.days:
        yield f"it lends on {', '.join(DAYS[day] for day in sorted(rules.days))} only"
    if rules.monthly_bytes is not None and seen.month_bytes >= rules.monthly_bytes:
        yield f"the month's {rules.monthly_bytes / 1e9:.3g} GB are used up"


def _over(seen: float | None, limit: float | None) -> bool:
    return seen is not None and limit is not None and seen > limit
