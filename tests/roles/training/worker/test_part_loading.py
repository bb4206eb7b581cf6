"""What a part announces of its speed as it is loaded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnode.compute.speed import Speeds
from swarmnode.compute.throttle import Throttle
from swarmnode.roles.measuring.capability import Conditions, SpeedCache
from swarmnode.roles.training.worker import part_loading
from swarmnode.roles.training.worker.part_loading import measure_part

WHOLE = Conditions(model="ab" * 32, device="cpu", memory_bytes=1 << 30, number_format="training", threads=1, units=8)
TRIED, WORKED = Speeds(training_units_per_s=100.0), Speeds(training_units_per_s=900.0)


class Part:
    """Half of the units, on a device that does at once what it is called for."""

    span = SimpleNamespace(units=4)
    segment = None

    async def call(self, _kind: str, function: Any, *, owner: str) -> Any:
        assert owner
        return function()


@pytest.mark.parametrize(("known", "announced"), [(None, TRIED), (WORKED, WORKED)])
def test_a_device_that_is_known_with_another_span_is_as_fast_with_this_one(
    known: Speeds | None, announced: Speeds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial is short, and of few positions: what a node's work says of it holds where it moves to."""
    monkeypatch.setattr(part_loading, "measure", lambda *_: TRIED)
    cache = SpeedCache(tmp_path / "speeds.json")
    if known is not None:
        cache.put(WHOLE, known)
    clock = SimpleNamespace(compute=lambda: 0.0, monotonic=lambda: 0.0)
    host: Any = SimpleNamespace(clock=clock, swarm=SimpleNamespace(id=b""))
    hardware: Any = SimpleNamespace(training_conditions=lambda _swarm, units, _lent: replace(WHOLE, units=units))
    lent, part = SimpleNamespace(throttle=Throttle()), Part()
    capability = asyncio.run(measure_part(host, part, hardware, lent, cache))  # type: ignore[arg-type]
    assert capability.speeds == announced
    assert cache.find(replace(WHOLE, units=4)) == announced
