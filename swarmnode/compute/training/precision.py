"""In which precision a card multiplies in training: in 16 bits by autocast where it is fast at them, and in TF32 what stays float32
since Ampere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from swarmnode.compute.device import computes_in_bfloat16

VOLTA = 7  # major compute capability: the first tensor cores, which multiply float16 alone


def autocast_dtype(device: torch.device, *, wanted: bool = True) -> torch.dtype | None:
    """bfloat16 since Ampere, float16 on Volta and Turing. None, which is float32: neither is fast, or `wanted` by the run."""
    if not wanted or device.type != "cuda":
        return None
    if computes_in_bfloat16(device):
        return torch.bfloat16
    major, _minor = torch.cuda.get_device_capability(device)
    return torch.float16 if major >= VOLTA else None


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype | None, *, alone: bool = True) -> Iterator[None]:
    """Around a forward pass; see `tf32` for `alone`."""
    with tf32(dtype, alone=alone), torch.autocast(device.type, dtype, enabled=dtype is not None):
        yield


@contextmanager
def tf32(dtype: torch.dtype | None, *, alone: bool = True) -> Iterator[None]:
    """Around a pass there, or back, which autocast needs nothing for: where its dtype is bfloat16. What else computes here,
    sessions in float32 among it, keeps float32. It is of the whole process: where other devices compute at the same time
    (not `alone`) it is left as it is."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if alone and dtype is torch.bfloat16 else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
