"""In which precision a card multiplies in training: bfloat16 by autocast and TF32 for what stays float32, since Ampere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from swarmnode.compute.device import computes_in_bfloat16


def is_fast(device: torch.device, *, wanted: bool) -> bool:
    """Whether this device multiplies in less than float32 at speed, where a run wants that."""
    return wanted and device.type == "cuda" and computes_in_bfloat16(device)


@contextmanager
def fast_forward(device: torch.device, *, wanted: bool, alone: bool = True) -> Iterator[None]:
    """Around a forward pass; see `tf32` for `alone`."""
    fast = is_fast(device, wanted=wanted)
    with tf32(fast and alone), torch.autocast(device.type, torch.bfloat16, enabled=fast):
        yield


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Around a pass there, or back, which autocast needs nothing for. What else computes here, sessions in float32 among it, keeps
    float32. It is of the whole process: where other devices compute at the same time it is left alone."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if enabled else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
