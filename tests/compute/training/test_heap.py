"""Freed tensors go back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from pathlib import Path
from swarmnode.training.worker.memory import give_back_large_tensors
def resident_mb(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4 / 1024
assert give_back_large_tensors()
before_mb = resident_mb()
tensors = [torch.ones(1 << 18) for _ in range(128)]
full_mb = resident_mb()
del tensors[:-1]  # the last one would hold the top of a heap
print(full_mb - before_mb, resident_mb() - before_mb)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library has no mallopt")
def test_freed_tensors_go_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    full_mb, left_mb = map(float, done.stdout.split())
    assert full_mb > 120 and left_mb < 20
