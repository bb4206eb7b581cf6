"""Fast products of packed weights on this machine: whether it has them, what a missing package would gain, and the host's memory
for experts beside a card."""

from __future__ import annotations

import importlib.util
import math

from swarmnode.compute.capacity.capacity import usable_bytes
from swarmnode.compute.capacity.expert_tiers import HostMemory
from swarmnode.compute.device import Device, probe_device
from swarmnode.compute.packing import ggml
from swarmnode.compute.packing.card_matrix import TRITON, kernels
from swarmnode.compute.stopwatch import measure_read_rate
from swarmnode.version import install_command

MEMORY_SHARE = 0.8  # of the free memory: a volunteer goes on using the machine
FASTER_PACKED = 3  # decoding with fast products on CPUs beside dequantised weights, docs/evidence.md


def has_packed_products(device: Device) -> bool:
    """Return whether there are fast products of packed weights for this device."""
    return ggml.library() is not None if device.kind == "cpu" else kernels(device.torch_device) is not None


def missing_products(device: Device, memory_ratio: float | None = None, *, is_fast: bool = True) -> str:
    """Return what a model of packed weights would gain on `device` with the package that multiplies them, and the command that
    installs it; or why the installed one cannot be used. Empty if a card lacks its products for another reason.

    Args:
        device: The device, which has no fast products of packed weights.
        memory_ratio: Bytes of the dequantised weights for each byte of the packed ones, if they are known.
        is_fast: Whether the products would be the fast ones, of which the gain in speed was measured on CPUs.
    """
    is_cpu = device.kind == "cpu"
    package = ggml.PACKAGE if is_cpu else TRITON
    times = "several times" if memory_ratio is None else f"{max(2, round(memory_ratio))} times"
    if is_cpu and (why := ggml.fault()):
        return (
            f"{package} cannot be used on this machine ({why}): the model is slower here, and takes {times} the memory."
        )
    if importlib.util.find_spec(package) is not None:
        return ""
    gain = f"run {FASTER_PACKED} times faster and " if is_cpu and is_fast else ""
    less = "less memory" if memory_ratio is None else f"{times} less memory"
    return f"This model would {gain}take {less} with {package}. Install: {install_command(package)}"


def host_memory(device: Device, *, measured: bool = False) -> HostMemory | None:
    """Return the host's memory that a node with a card uses for experts, and the speed of reading it if it is `measured`; None if
    `device` is no card, or experts cannot be computed on either side."""
    if device.kind != "cuda" or ggml.library() is None or not has_packed_products(device):
        return None
    cpu = probe_device("cpu")
    return HostMemory(
        usable_bytes(int(cpu.free_bytes * MEMORY_SHARE)), measure_read_rate(cpu) if measured else math.inf
    )
