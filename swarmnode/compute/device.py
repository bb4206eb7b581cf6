"""Devices of this machine: their kind, memory and dtype."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from swarmnode.errors import LocalError

_REMEDY = "update its driver, install a torch that was built for it, or say --device cpu"
AMPERE = 8  # major compute capability
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Device:
    """A device, with its memory when it was probed. `shared` says that its memory is the machine's own."""

    kind: str  # cuda, mps or cpu
    index: int
    name: str
    total_bytes: int
    free_bytes: int
    shared: bool

    @property
    def torch_device(self) -> torch.device:
        """The device as a torch.device."""
        return torch.device(self.kind, self.index) if self.kind == "cuda" else torch.device(self.kind)

    @property
    def default_dtype(self) -> torch.dtype:
        """Dtype to compute in by default: bfloat16 if the card is fast in it, float16 on other GPUs, float32 on CPUs."""
        if self.kind == "cuda":
            return torch.bfloat16 if computes_in_bfloat16(self.torch_device) else torch.float16
        return torch.float16 if self.kind == "mps" else torch.float32

    def dtype_for(self, own: torch.dtype, wanted: str = "auto") -> torch.dtype:
        """Return the dtype to compute in: `wanted`, or for "auto" the checkpoint's `own`, so that replicas agree.

        If this device is slow in `own`, "auto" is the device's default dtype.
        """
        if wanted != "auto":
            return DTYPES[wanted]
        slow = own is torch.float16 if self.kind == "cpu" else own is torch.bfloat16 and self.default_dtype is not own
        return self.default_dtype if slow else own

    def use(self) -> None:
        """Make this card the calling thread's current CUDA device. No effect on other kinds of devices."""
        if self.kind == "cuda":
            torch.cuda.set_device(self.torch_device)

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.free_bytes / 2**30:.1f} of {self.total_bytes / 2**30:.1f} GiB free)"


def computes_in_bfloat16(card: torch.device) -> bool:
    """Return whether a CUDA device is fast in bfloat16: NVIDIA since Ampere, and all of AMD's. Older cards emulate it."""
    major, _minor = torch.cuda.get_device_capability(card)
    return torch.version.hip is not None or major >= AMPERE


def probe_devices(wanted: str = "auto") -> tuple[Device, ...]:
    """Return the devices named by `wanted`: one or several ("cuda:0,cuda:1"), or "all" for every card.

    CPU devices ("cpu:0,cpu:1") are threads that compute side by side, at most as many as there are cores. Raises LocalError
    if a device does not exist.
    """
    if wanted != "all":
        return tuple(probe_device(name) for name in wanted.split(","))
    if not torch.cuda.is_available():
        raise LocalError("no device 'all': torch finds no usable card on this machine; use cpu")
    return tuple(_probe_cuda(number) for number in range(torch.cuda.device_count()))


def probe_device(wanted: str = "auto") -> Device:
    """Return the device named by `wanted`; "auto" is the GPU with most free memory, else the CPU.

    Raises LocalError if the device does not exist or cannot compute.
    """
    kind, _, number = wanted.partition(":")
    if number and not number.isdecimal():
        raise LocalError(f"no device {wanted!r}: devices are numbered, as in cuda:1 or cpu:1")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind == "cuda" and torch.cuda.is_available():
        return _probe_cuda(int(number) if number else None)
    if kind == "mps" and torch.backends.mps.is_available():
        memory = psutil.virtual_memory()
        return Device("mps", 0, f"Apple {platform.processor()}", memory.total, memory.available, shared=True)
    if kind == "cpu":
        index = int(number or 0)
        if index >= usable_cores():
            raise LocalError(f"no device cpu:{index}: there are {usable_cores()} cores, numbered from 0")
        memory = psutil.virtual_memory()  # which all CPU devices share
        total_bytes = min(memory.total, _container_limit_bytes() or memory.total)
        return Device("cpu", index, _cpu_name(), total_bytes, min(memory.available, total_bytes), shared=True)
    usable = ["auto", "cpu"]
    if torch.cuda.is_available():
        usable += ["cuda", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        usable.append("mps")
    raise LocalError(f"no device {wanted!r} on this machine: use {' or '.join(usable)}")


def set_threads(count: int | None = None) -> int:
    """Let torch use `count` threads (default: OMP_NUM_THREADS, else the cores this process may use). Returns the count."""
    if count is None:
        count = int(os.environ.get("OMP_NUM_THREADS", 0)) or usable_cores()
    torch.set_num_threads(count)
    return count


def threads_each(wanted: str, threads: int | None, devices: int) -> int | None:
    """Return the threads for each of several devices: `threads` if given; else CPU devices named "cpu:N" share the cores.

    None leaves the number to torch.
    """
    if threads is None and wanted.startswith("cpu:"):
        return max(1, usable_cores() // devices)
    return threads


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _probe_cuda(index: int | None) -> Device:
    """Return card `index`, or the one with most free memory if it is None. Raises LocalError if it is missing or cannot compute.

    torch counts only the devices that CUDA_VISIBLE_DEVICES leaves. The memory is that of the whole card.
    """
    count = torch.cuda.device_count()
    if index is not None and index >= count:
        raise LocalError(f"no device cuda:{index}: there are {count} cards, numbered from 0")
    indices = range(count) if index is None else [index]
    memory = {number: _card_memory(number) for number in indices}
    best = max(memory, key=lambda number: memory[number][0])
    name = torch.cuda.get_device_name(best)
    _compute_on(torch.device("cuda", best), name)
    free_bytes, total_bytes = _card_memory(best)  # measured again: its context now takes some
    return Device("cuda", best, name, total_bytes, free_bytes, shared=False)


def _compute_on(card: torch.device, name: str) -> None:
    """Multiply two matrices on the card, so that libraries take their workspaces. Raises LocalError if it fails or is wrong."""
    try:
        ones = torch.ones(16, 16, device=card)
        works = float((ones @ ones).sum()) == 16**3
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise LocalError(
            f"{name} is here, but torch {torch.__version__} cannot compute on it: {reason}; {_REMEDY}"
        ) from error
    if not works:
        raise LocalError(f"{name} computes wrong results with torch {torch.__version__}; {_REMEDY}")


def _card_memory(index: int) -> tuple[int, int]:
    """Return the free and total bytes, from the driver: a query through CUDA takes some 300 MB of each card."""
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-")
        memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except (pynvml.NVMLError, AttributeError):  # no driver library, or a torch that does not know the card's UUID
        return torch.cuda.mem_get_info(index)
    return int(memory.free), int(memory.total)


def _container_limit_bytes() -> int | None:
    """Return the memory limit of the control group (containers, systemd units), which psutil ignores; None if there is none."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(file).read_text())
        except (OSError, ValueError):  # missing, or "max"
            continue
    return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def free_memory() -> None:
    """Give unused memory back to other programs on the device, and to the system."""
    gc.unfreeze()  # serving freezes all objects (`ServingStage.serve`), and its model may be in a reference cycle
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim_heap()


def trim_heap() -> None:
    """Give the freed pages that the C library keeps back to the system. Does nothing unless it is glibc."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
