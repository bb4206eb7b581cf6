"""Randomness of training as a function of (run's seed, step, microbatch, unit): replays and recomputations draw the same.

What is no plain dropout (`dropout.py`) draws from torch's generators, one for each card and one for all else, which therefore
belong to training while it computes: devices that share one make their forward passes one after another (`drawing`).
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

_GENERATOR = threading.Lock()  # of the CPU


def microbatch_seed(run_seed: int, step: int, index: int) -> int:
    """The seed of one microbatch, 63 bits."""
    return hashed(run_seed, step, index)


def reseed(seed: int, unit: int, device: torch.device) -> None:
    """Set torch's generators, of the CPU and of this device, for the code of one unit on the microbatch of this seed."""
    value = hashed(seed, unit)
    torch.default_generator.manual_seed(value)  # torch.manual_seed would seed every card of the machine
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(value)
    elif device.type == "mps":
        torch.mps.manual_seed(value)


@contextmanager
def drawing(device: torch.device) -> Iterator[None]:
    """Around a forward pass: nobody else draws from the same generator meanwhile."""
    with nullcontext() if device.type == "cuda" else _GENERATOR:
        yield


def hashed(*numbers: int) -> int:
    """63 well-mixed bits (the CPU's Mersenne twister takes the lower 32 only)."""
    raw = struct.pack(f"<{len(numbers)}Q", *(number & 0xFFFFFFFFFFFFFFFF for number in numbers))
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 1
