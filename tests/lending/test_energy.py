"""What cards draw is counted once, over restarts, days and several nodes."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmnode.lending.cards import FILE, MEASURE_S, RUNNING_S, Cards, Energy, EnergyMeter, energy_used
from tests.lending.test_card_guard import NvmlError, driver

NOON = datetime.datetime(2026, 11, 22, 12).timestamp()


class Machine:
    """A card that draws 100 W, and the time."""

    def __init__(self, home: Path) -> None:
        self.home, self.now, self.counter_j = home, NOON, 5e6

    def meter(self) -> EnergyMeter:
        return EnergyMeter(self.home, lambda: SimpleNamespace(joules=lambda: self.counter_j), now=lambda: self.now)

    def passes(self, seconds: float) -> None:
        self.now, self.counter_j = self.now + seconds, self.counter_j + 100 * seconds

    @property
    def used(self) -> Energy | None:
        return energy_used(self.home, lambda: self.now)


def test_it_counts_while_a_node_runs_and_not_between(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.used is None
    first, second = machine.meter(), machine.meter()
    first.record(machine.counter_j)
    assert machine.used == Energy(0, 0), "what was drawn before is not ours"
    for _ in range(3):
        machine.passes(MEASURE_S / 2)
        first.record(machine.counter_j)
        machine.passes(MEASURE_S / 2)
        second.record(machine.counter_j)  # another node, on the same cards
    assert machine.used == Energy(3 * MEASURE_S * 100, 3 * MEASURE_S * 100)
    machine.passes(RUNNING_S + 1)  # nobody lends
    machine.meter().record(machine.counter_j)
    assert machine.used == Energy(3 * MEASURE_S * 100, 3 * MEASURE_S * 100)
    machine.now = NOON + 86400
    assert machine.used == Energy(0, 3 * MEASURE_S * 100) and "0.01 kWh in all" in str(machine.used)


@pytest.mark.parametrize("counter_j", [0.0, 4e6])
def test_a_driver_that_was_loaded_anew_counts_from_nothing(tmp_path: Path, counter_j: float) -> None:
    machine = Machine(tmp_path)
    machine.meter().record(machine.counter_j)
    machine.now, machine.counter_j = machine.now + MEASURE_S, counter_j
    machine.meter().record(machine.counter_j)
    assert machine.used == Energy(0, 0)


def test_a_damaged_file_and_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (tmp_path / FILE).write_text("{")
    machine.meter().record(machine.counter_j)
    assert machine.used == Energy(0, 0)
    (tmp_path / "file").write_text("")
    EnergyMeter(tmp_path / "file", SimpleNamespace).record(1.0)


def test_what_the_driver_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In millijoules, of the cards that do."""

    def energy(card: int) -> int:
        if card == 1:
            raise NvmlError
        return 7_500

    monkeypatch.setitem(sys.modules, "pynvml", driver(nvmlDeviceGetTotalEnergyConsumption=energy))
    assert Cards().joules() == 7.5
    monkeypatch.setitem(sys.modules, "pynvml", driver(nvmlDeviceGetTotalEnergyConsumption=lambda _card: energy(1)))
    assert Cards().joules() is None


async def test_without_a_card_nothing_is_watched(tmp_path: Path) -> None:
    meter = EnergyMeter.start(tmp_path, lambda: SimpleNamespace(joules=lambda: None), on_crash=None)
    await meter._watch()
    await meter.close()
    assert not (tmp_path / FILE).exists()
