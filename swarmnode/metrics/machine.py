"""Figures of the machine: versions, disk, CPU time, and NVIDIA cards (by NVML, their driver's library)."""

from __future__ import annotations

import logging
import platform
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from swarmnode.files import existing
from swarmnode.metrics import table
from swarmnode.metrics.metric import Metric, Reading, Readings, Source
from swarmnode.version import __version__

log = logging.getLogger(__name__)

MOMENTS, MOMENT_S = 5, 0.001


def machine(home: Path) -> Source:
    """Return a function that reads the machine's figures; `home` is the folder with the state of the process."""
    nvml, handles = nvidia_cards()
    cards = [Card(nvml, handle, index) for index, handle in enumerate(handles)]

    def read() -> Readings:
        yield build()
        yield from disk(home)
        yield from (reading for card in cards for reading in card.read())

    return read


def build() -> Reading:
    """Return the reading of the versions in use; torch's is empty if torch is not loaded."""
    torch = sys.modules.get("torch")
    versions = (__version__, platform.python_version(), str(getattr(torch, "__version__", "")))
    return Reading(table.BUILD, 1.0, versions)


def disk(folder: Path) -> Readings:
    """Yield free and total space of the disk of `folder`, which need not exist yet."""
    usage = shutil.disk_usage(existing(folder))
    yield Reading(table.DISK_FREE, usage.free)
    yield Reading(table.DISK_SIZE, usage.total)


def cpu_seconds() -> tuple[float, float]:
    """Return the CPU seconds of all cores since the machine started, and those among them in which some program ran."""
    times = psutil.cpu_times()
    guest_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # also counted in user and nice
    all_s = sum(times) - guest_s
    return all_s, all_s - times.idle - getattr(times, "iowait", 0.0)


def running_threads() -> int | None:
    """Return how many threads of all programs run or wait for a core: the fewest of some moments, since a thread that only answers
    another program ends meanwhile. None where the system does not tell."""
    found = []
    for _ in range(MOMENTS):
        try:
            found.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]))
        except (OSError, ValueError, IndexError):
            return None
        time.sleep(MOMENT_S)
    return min(found)


class Card:
    """NVIDIA card. Figures that its driver does not give (power, on many laptops) are left out."""

    def __init__(self, nvml: Any, handle: Any, index: int) -> None:
        self._nvml = nvml
        self._handle = handle
        model = nvml.nvmlDeviceGetName(handle)
        self._labels = (str(index), model.decode() if isinstance(model, bytes) else model)

    def read(self) -> Readings:
        """Yield the card's current use, memory, temperature and power."""
        nvml, handle = self._nvml, self._handle
        figures: dict[Metric, Callable[[], float]] = {
            table.GPU_BUSY: lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            table.GPU_MEMORY_USED: lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            table.GPU_MEMORY_SIZE: lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            table.GPU_TEMPERATURE: lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            table.GPU_POWER: lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,  # milliwatts
        }
        for metric, figure in figures.items():
            try:
                yield Reading(metric, float(figure()), self._labels)
            except nvml.NVMLError:
                continue


def nvidia_cards() -> tuple[Any, list[Any]]:
    """Return NVML and its handles of this machine's NVIDIA cards; no handles if there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        log.info("no NVIDIA driver to ask: %s", error)
        return pynvml, []
