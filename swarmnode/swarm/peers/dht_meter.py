"""DhtMeter: how long the DHT takes, and how often it fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from swarmnode.metrics import table
from swarmnode.metrics.histogram import Histogram
from swarmnode.metrics.metric import Reading, Readings

GET, STORE = "get", "store"


class DhtMeter:
    """Times operations where they are asked for, so that what waits for p2pd counts."""

    def __init__(self) -> None:
        self._seconds = {operation: Histogram() for operation in (GET, STORE)}
        self._failures = Counter(dict.fromkeys((GET, STORE), 0))

    def __repr__(self) -> str:
        return f"<DhtMeter {self._seconds}, {self._failures.total()} failed>"

    @contextmanager
    def timing(self, operation: str) -> Iterator[None]:
        """Around one operation. One that was cancelled has not failed."""
        try:
            with self._seconds[operation].timing():
                yield
        except Exception:
            self._failures[operation] += 1
            raise

    def readings(self) -> Readings:
        """All of it."""
        for operation, seconds in self._seconds.items():
            yield Reading(table.DHT_SECONDS, seconds, (operation,))
            yield Reading(table.DHT_FAILURES, self._failures[operation], (operation,))
