"""Reports to the owner about a node's work for others, in a line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swarmnode.counting import counted
from swarmnode.metrics import table
from swarmnode.metrics.metric import Histogram, Metric, Reading, Readings, Source
from swarmnode.net.addressing.reachability import Reachability

GIVEN = (table.POSITIONS_FOR_OTHERS, table.UNIT_TOKENS, table.TRAINING_STEP, table.TRAINING_LOSS)
REACHED = {
    Reachability.UNKNOWN: "still checking whether others can reach this machine",
    Reachability.PUBLIC: "others reach this machine directly",
    Reachability.MAPPED: "others reach this machine through a mapped port of the router",
    Reachability.PUNCHED: "others reach this machine through holes punched in the router",
    Reachability.RELAYED: "others reach this machine over a relay only",
}


@dataclass(frozen=True)
class ServiceReport:
    """Report about a node's work. `tokens` are positions computed since the node started, `tokens_per_s` the rate since the last
    report."""

    tokens: int
    tokens_per_s: float
    sessions: int
    reachability: Reachability

    def __str__(self) -> str:
        now = (
            f"{counted(self.sessions, 'session')} now, {self.tokens_per_s:,.1f} tokens/s"
            if self.sessions
            else "idle now"
        )
        return f"{counted(self.tokens, 'token')} computed for others; {now}; {REACHED[self.reachability]}"


class ServiceReporter:
    """Maker of reports from the node's own readings."""

    def __init__(self, readings: Source, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._readings = readings
        self._clock = clock
        self._last: ServiceReport | None = None
        self._last_s = clock()

    def __repr__(self) -> str:
        return f"<ServiceReporter {self._last}>"

    def report(self, reachability: Reachability) -> ServiceReport | None:
        """Return a report; None if nothing has changed since the last one."""
        tokens = sessions = 0.0
        for reading in self._readings():
            tokens += _value(reading) if reading.metric is table.TOKENS else 0.0
            sessions += _value(reading) if reading.metric is table.SESSIONS else 0.0
        now_s, before = self._clock(), self._last
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        fresh = tokens - (before.tokens if before is not None else 0)
        report = ServiceReport(int(tokens), fresh / elapsed_s if elapsed_s > 0 else 0.0, int(sessions), reachability)
        self._last = report
        return None if report == before else report


def given(readings: Readings) -> dict[str, Any]:
    """Return the sums of a node's work for its owner's page: positions computed for others, positions times units, bytes on links;
    and step and loss if it trains."""
    sums: Counter[Metric] = Counter()
    directions: Counter[str] = Counter()
    for reading in readings:
        if reading.metric in GIVEN:
            sums[reading.metric] += _value(reading)  # type: ignore[assignment]
        elif reading.metric is table.LINK_BYTES:
            directions[reading.labels[1]] += int(_value(reading))
    trains = table.TRAINING_LOSS in sums
    return {
        "tokens": int(sums[table.POSITIONS_FOR_OTHERS]),
        "unit_tokens": int(sums[table.UNIT_TOKENS]),
        "link_bytes": {direction: directions[direction] for direction in ("sent", "received")},
        "training": {"step": int(sums[table.TRAINING_STEP]), "loss": sums[table.TRAINING_LOSS]} if trains else None,
    }


def _value(reading: Reading) -> float:
    assert not isinstance(reading.value, Histogram)
    return float(reading.value)
