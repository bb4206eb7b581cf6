"""What a part announces of its speed as it is loaded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnode.compute.capacity.capacity import Speeds
from swarmnode.compute.stopwatch import Throttle
from swarmnode.measuring.capability import Capability, Conditions, SpeedCache
from swarmnode.training.worker import training_parts
from swarmnode.training.worker.training_parts import measure_part

WHOLE = Conditions(model="ab" * 32, device="cpu", memory_bytes=1 << 30, number_format="training", threads=1, units=8)
TRIED, WORKED = Speeds(training_units_per_s=100.0), Speeds(training_units_per_s=900.0)


class Part:
    """Half of the units, on a device that does at once what it is called for."""

    span = SimpleNamespace(units=4)
    segment = None

    async def call(self, _kind: str, function: Any, *, owner: str) -> Any:
        assert owner
        return function()


def measured(cache: SpeedCache) -> Capability:
    clock = SimpleNamespace(compute=lambda: 0.0, monotonic=lambda: 0.0)
    host = SimpleNamespace(clock=clock, swarm=SimpleNamespace(id=b""))
    hardware = SimpleNamespace(training_conditions=lambda _swarm, units, _lent: replace(WHOLE, units=units))
    lent: Any = SimpleNamespace(throttle=Throttle())
    part: Any = Part()
    place: Any = SimpleNamespace(host=host, hardware=hardware, speed_cache=cache)
    return asyncio.run(measure_part(place, part, lent))


@pytest.mark.parametrize("has_worked", [False, True])
def test_what_a_devices_work_has_shown_holds_for_other_units(
    has_worked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial is short, and of few positions: also one with these units, before there was any work."""
    monkeypatch.setattr(training_parts, "measure", lambda *_: TRIED)
    days = iter(range(1, 9))
    cache = SpeedCache(tmp_path / "speeds.json", now=lambda: float(next(days)))
    cache.put(replace(WHOLE, units=4), TRIED)
    if has_worked:
        cache.put(WHOLE, WORKED)
    capability = measured(cache)
    assert capability.speeds == (WORKED if has_worked else TRIED)


def test_a_device_that_is_not_known_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_parts, "measure", lambda *_: TRIED)
    cache = SpeedCache(tmp_path / "speeds.json")
    capability = measured(cache)
    assert capability.speeds == cache.find(replace(WHOLE, units=4)) == TRIED
