"""Timing of work on a device, and measurements of a device's memory and of a disk.

A card works asynchronously, so the time that the host's calls take says nothing about the card's time.

Throttle: slows a device down, because its owner lends a share of it, or to have peers of unequal speed on one machine.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from swarmnode.compute.device import Device
from swarmnode.errors import LocalError

MOST_OVERSLEPT_S = (
    1.0  # most excess sleep that later passes make up for; after a machine's suspension the rest is ignored
)
PREFILL_GAIN = 16.0  # positions per second in a prompt chunk or microbatch, relative to single ones
FORWARD_WORK, BACKWARD_WORK = 1.0, 2.0  # of a microbatch, in passes of a prompt chunk
TRAINING_WORK = FORWARD_WORK + BACKWARD_WORK


class Throttle:
    """Throttle of one device. Used from one thread.

    A pass takes at least as long as on a device that does `units_per_s` layers of single positions (infinity: no limit). The device
    then rests, so that it is busy for a `share` of the time (its duty cycle) while there is work. Later rests make up for
    sleeps that were too long. All rows of a decode pass count as one position, as its cost is that of reading the weights.
    """

    def __init__(
        self,
        units_per_s: float = math.inf,
        share: float = 1.0,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not units_per_s > 0:
            raise ValueError(f"units_per_s is {units_per_s}: it must be above 0")
        if not 0 < share <= 1:
            raise ValueError(f"share is {share}: it must be above 0 and at most 1")
        self.units_per_s = units_per_s
        self.share = share
        self._owed_s = 0.0  # rest still due; negative after sleeps that were too long
        self._clock = clock
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"Throttle({self.units_per_s:g} units/s, {self.share:.0%} of the time)"

    def least_s(self, units: int, positions: int) -> float:
        """Return the least seconds for `units` layers of `positions` positions: 1 means a decode pass, more a prompt chunk."""
        passes = 1.0 if positions == 1 else max(1.0, positions / PREFILL_GAIN)
        return units * passes / self.units_per_s

    def least_of_work_s(self, work: float) -> float:
        """Return the least seconds for training work, in positions times layers of a long prompt chunk (see `TRAINING_WORK`)."""
        return work / PREFILL_GAIN / self.units_per_s

    def lent_s(self, took_s: float, least_s: float) -> float:
        """Return the seconds that a pass takes on the lent device: `took_s` on the real one, at least `least_s` on a slower one."""
        return max(took_s / self.share, least_s)

    @property
    def slows(self) -> bool:
        """Whether the node computes more slowly than its device could, by a share or a speed limit."""
        return self.share < 1 or self.units_per_s < math.inf

    def pass_over(self, units: int, positions: int) -> AbstractContextManager[None]:
        """Return a context that makes one serving pass of `units` layers and `positions` positions take at least its least time."""
        return self.lending(self.least_s(units, positions))

    @contextmanager
    def lending(self, least_s: float) -> Iterator[None]:
        """Make the enclosed work take at least `least_s` seconds, and rest after it for as long as the lent share demands."""
        began_s = self._clock()
        yield
        took_s = self._clock() - began_s
        self._rest(self.lent_s(took_s, least_s) - took_s)

    def _rest(self, seconds: float) -> None:
        """Sleep for `seconds`, less the excess of earlier sleeps that were too long."""
        if seconds <= 0:
            return
        self._owed_s += seconds
        if self._owed_s > 0:
            began_s = self._clock()
            self._sleep(self._owed_s)
            self._owed_s = max(-MOST_OVERSLEPT_S, self._owed_s - (self._clock() - began_s))


MOST_UNREAD = 64  # passes without a wait for their results
BUDGET_S = 0.2  # for the fastest of several passes; a single pass may take longer
MOST_PASSES = 8
READ_BYTES = 256 << 20  # of a device's memory: far more than any cache holds
READ_PASSES = 5
DISK_BYTES = 64 << 20
PIECE = bytes(1 << 20)

Clock = Callable[[], float]

Tell = Callable[[float], None]
"""Callback that receives the seconds of a pass, once, when they are known"""


def measure_disk(folder: Path, *, clock: Clock = time.perf_counter) -> tuple[float, float]:
    """Measure how many bytes/s `folder`'s disk writes (until they are on the disk) and reads. Returns both.

    The read bypasses the system's cache on Linux only. The file is removed. Raises LocalError if it cannot be written.
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
        raise LocalError(f"cannot write {folder}: {error.strerror or error}; choose another folder") from error
    return pieces * len(PIECE) / max(written_s, 1e-9), pieces * len(PIECE) / max(read_s, 1e-9)


def measure_read_rate(device: Device, *, clock: Clock = time.perf_counter) -> float:
    """Measure the bytes/s that `device` reads from its memory: the best of a few passes over a buffer."""
    size_bytes = max(4096, min(READ_BYTES, device.free_bytes // 4)) // 4 * 4
    buffer_N = torch.ones(size_bytes // 4, dtype=torch.float32, device=device.torch_device)
    best_s = float("inf")
    for _ in range(READ_PASSES):
        began_s = clock()
        float(buffer_N.sum())  # waits for the device
        best_s = min(best_s, clock() - began_s)
    return size_bytes / max(best_s, 1e-9)


def synchronize(device: torch.device) -> None:
    """Wait until `device`, and no other one, has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def best_s(work: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """Measure the shortest of several passes of `work`, in seconds. The first passes warm up caches, others may be disturbed."""
    synchronize(device)  # earlier work must not count
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
    """Stopwatch for passes on one device, used from one thread.

    If the device is throttled (a lent share or a lower speed), it rests after each pass, and the rest counts as part of the pass.

    On a card, events are recorded before and after a pass. They are read when another pass begins or on `read`, if the card has
    reached them by then. A caller that fetches results waits for the card anyway.
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

    @contextmanager
    def timing(self, tell: Tell, work: float = 0.0) -> Iterator[None]:
        """Time one pass of `work` (in the unit of `Throttle.least_of_work_s`). `tell` gets the seconds, unless the pass raises."""
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
        """Report the seconds of all timed passes that the card has finished."""
        while self._unread and self._unread[0][1].query():
            began, ended, tell = self._unread.popleft()
            tell(began.elapsed_time(ended) / 1000)
