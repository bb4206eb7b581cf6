"""Timing of work on a device, and measurements of a device's memory and of a disk.

A card gets its work and does it later, so that the time that the host needs says nothing of the card's.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from swarmnode.compute.device import Device
from swarmnode.compute.throttle import Throttle
from swarmnode.errors import LocalError

MOST_UNREAD = 64  # passes behind which nobody has waited
BUDGET_S = 0.2  # for the fastest of several passes; a single pass may take longer
MOST_PASSES = 8
READ_BYTES = 256 << 20  # of a device's memory: far more than any cache holds
READ_PASSES = 5
DISK_BYTES = 64 << 20
PIECE = bytes(1 << 20)

Clock = Callable[[], float]

Tell = Callable[[float], None]
"""(seconds): called once, when they are known"""


def measure_disk(folder: Path, *, clock: Clock = time.perf_counter) -> tuple[float, float]:
    """Bytes/s written, until they are on the disk, and read, past the system's cache where it can be told to forget.

    The file is taken away again. Raises LocalError where nothing can be written there.
    """
    pieces = max(1, DISK_BYTES // len(PIECE))
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            began_s = clock()
            for _ in range(pieces):
                file.write(PIECE)
            os.fsync(file.fileno())
            written_s = clock() - began_s
            if sys.platform == "linux":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            began_s = clock()
            while file.read(len(PIECE)):
                pass
            read_s = clock() - began_s
    except OSError as error:
        raise LocalError(f"cannot write {folder}: {error.strerror or error}") from error
    return pieces * len(PIECE) / max(written_s, 1e-9), pieces * len(PIECE) / max(read_s, 1e-9)


def measure_read_rate(device: Device, *, clock: Clock = time.perf_counter) -> float:
    """Bytes per second, the best of a few passes over a buffer; half a second on a slow machine."""
    size_bytes = max(4096, min(READ_BYTES, device.free_bytes // 4)) // 4 * 4
    buffer_N = torch.ones(size_bytes // 4, dtype=torch.float32, device=device.torch_device)
    best_s = float("inf")
    for _ in range(READ_PASSES):
        began_s = clock()
        float(buffer_N.sum())  # waits for the device
        best_s = min(best_s, clock() - began_s)
    return size_bytes / max(best_s, 1e-9)


def synchronize(device: torch.device) -> None:
    """Wait for everything that a device was told until now, and for no other device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def best_s(work: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """The shortest of several passes; the first ones warm up caches, and others may have disturbed some."""
    synchronize(device)  # what it does still is not of these passes
    best_s, deadline_s = float("inf"), clock() + BUDGET_S
    for _ in range(MOST_PASSES):
        began_s = clock()
        work()
        synchronize(device)
        best_s = min(best_s, clock() - began_s)
        if clock() >= deadline_s:
            break
    return max(best_s, 1e-9)


class Stopwatch:
    """Times passes on one device, from one thread.

    Where the device is lent for a share of the time, or as a slower one, it rests behind each pass, which counts with its rest.

    On a card, events go before and behind a pass. They are read when another pass begins or somebody asks, if the card has come to
    them by then; whoever fetches results waits for it anyway.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        clock: Clock = time.perf_counter,
        throttle: Throttle | None = None,
    ) -> None:
        self._throttle = throttle or Throttle()
        self._device = device
        self._clock = clock
        self._unread: deque[tuple[torch.Event, torch.Event, Tell]] = deque(maxlen=MOST_UNREAD)

    def __repr__(self) -> str:
        return f"<Stopwatch of {self._device}, {len(self._unread)} passes unread>"

    @contextmanager
    def timing(self, tell: Tell, work: float = 0.0) -> Iterator[None]:
        """Around one pass, of so much work (`Throttle.least_of_work_s`); what fails is not told."""
        self.read()
        if self._throttle.slows:
            began_s = self._clock()
            with self._throttle.lending(self._throttle.least_of_work_s(work)):
                yield
                synchronize(self._device)
            tell(self._clock() - began_s)
            return
        if self._device.type == "cuda":
            began, ended = (torch.Event(self._device, enable_timing=True) for _ in range(2))
            began.record(torch.accelerator.current_stream(self._device))  # this card's, whichever is the thread's
            yield
            ended.record(torch.accelerator.current_stream(self._device))
            self._unread.append((began, ended, tell))
            return
        began_s = self._clock()
        yield
        synchronize(self._device)
        tell(self._clock() - began_s)

    def read(self) -> None:
        """Tell of the passes that the card is done with."""
        while self._unread and self._unread[0][1].query():
            began, ended, tell = self._unread.popleft()
            tell(began.elapsed_time(ended) / 1000)
