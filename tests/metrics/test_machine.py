"""The machine's figures, with cards that are played and without any."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmnode.metrics import table
from swarmnode.metrics.machine import build, disk, machine
from swarmnode.version import __version__


class NoSuchFigure(Exception):
    """What NVML raises."""


class FakeNvml:
    """NVIDIA's library with two cards, of which the second does not tell its power."""

    NVMLError = NoSuchFigure
    NVML_TEMPERATURE_GPU = 0

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"Card {handle}"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=40)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=3 << 30, total=8 << 30)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61 + handle

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise NoSuchFigure
        return 125_500


class NoDriver(FakeNvml):
    """A machine without NVIDIA's driver."""

    def nvmlInit(self) -> None:
        raise NoSuchFigure


def test_cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    figures = {(reading.metric, reading.labels): reading.value for reading in machine(tmp_path)()}
    first, second = ("0", "Card 0"), ("1", "Card 1")
    assert figures[table.GPU_BUSY, first] == 0.4
    assert figures[table.GPU_MEMORY_USED, first] == 3 << 30
    assert figures[table.GPU_MEMORY_SIZE, second] == 8 << 30
    assert figures[table.GPU_TEMPERATURE, second] == 62
    assert figures[table.GPU_POWER, first] == 125.5
    assert (table.GPU_POWER, second) not in figures


def test_without_a_driver_there_are_no_cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", NoDriver())
    names = {reading.metric.name for reading in machine(tmp_path)()}
    assert names == {"swarmnode_build_info", "swarmnode_disk_free_bytes", "swarmnode_disk_size_bytes"}


def test_versions() -> None:
    assert build().labels[0] == __version__


def test_a_folder_that_is_not_there_yet_is_on_the_disk_of_its_parent(tmp_path: Path) -> None:
    free, size = (reading.value for reading in disk(tmp_path / "not" / "yet"))
    assert isinstance(free, int) and isinstance(size, int) and 0 < free < size
