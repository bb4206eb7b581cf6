"""Let the memory of freed tensors go back to the system, for stages that train where memory is short."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
LARGE_BYTES = 900_000  # from here on a tensor gets pages of its own
KEPT_BYTES = 256 << 20  # the heap of small things is not cut back


def give_back_large_tensors() -> bool:
    """For this process, for good; False where the C library is not glibc.

    By default glibc puts tensors of up to 32 MB into one heap, where activations of many sizes leave holes: a stage that
    recomputes held 1.6 times what it must, and with this 1.26 times, at 0.77 of the speed (8 layers of 512 in two stages,
    contrib/benchmarks/training_memory.py). GPUs are not concerned.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
