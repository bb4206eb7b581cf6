"""How fast a device reads its memory: what decoding is bound by."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from swarmnode.compute.device import Device

MOST_BYTES = 256 << 20  # far more than any cache holds
PASSES = 5


def measure_read_rate(device: Device, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second, the best of a few passes over a buffer; half a second on a slow machine."""
    size_bytes = max(4096, min(MOST_BYTES, device.free_bytes // 4)) // 4 * 4
    buffer_N = torch.ones(size_bytes // 4, dtype=torch.float32, device=device.torch_device)
    best_s = float("inf")
    for _ in range(PASSES):
        began_s = clock()
        float(buffer_N.sum())  # waits for the device
        best_s = min(best_s, clock() - began_s)
    return size_bytes / max(best_s, 1e-9)
