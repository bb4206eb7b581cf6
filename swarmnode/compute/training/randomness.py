"""Randomness of training as a function of (run's seed, step, microbatch, unit): replays and recomputations draw the same.

Dropout draws from torch's global generators, which therefore belong to training while it computes: two segments that
use dropout must not compute at the same time in one process.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

import torch


def microbatch_seed(run_seed: int, step: int, index: int) -> int:
    """The seed of one microbatch, 63 bits."""
    return _hash(run_seed, step, index)


def reseed(seed: int, unit: int) -> None:
    """Set torch's generators, of the CPU and of all devices, for the code of one unit on the microbatch of this seed."""
    value = _hash(seed, unit)
    if _has_accelerator():
        torch.manual_seed(value)
    else:  # what manual_seed does for devices that are not there takes milliseconds: it formats the whole stack for each
        torch.default_generator.manual_seed(value)


@lru_cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def _hash(*numbers: int) -> int:
    """63 well-mixed bits (the CPU's Mersenne twister takes the lower 32 only)."""
    raw = struct.pack(f"<{len(numbers)}Q", *(number & 0xFFFFFFFFFFFFFFFF for number in numbers))
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 1
