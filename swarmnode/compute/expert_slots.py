"""Slots of memory for the experts of mixtures that are larger than the memory, and workers that read experts from the disk.

Each layer has slots for some of its experts, and each slot holds all matrices of one. If a pass needs an expert that is in no slot,
it takes the slot of the expert that was used least recently, and of those the one that was used least. Files are read past the page
cache, and never mapped: a mapped file that is cut short would end the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarmnode.errors import CheckpointError, LocalError, WeightsLost

PAGE = 4096  # bytes that reads past the page cache are whole multiples of
PIECE_BYTES = 1 << 20  # of one read: several are on their way at once, and one fills its slot while others are read
WORKERS = 4  # with more, a disk is no faster with pieces of this size
TIMEOUT_S = 20.0  # of one wait for the disk
IDLE_S = 5.0  # after which a worker ends, until there is something to read again
HALF_LIFE = 256  # passes


@dataclass(frozen=True)
class ByteRange:
    """Bytes [begin, end) of a file that hold one matrix, of which each `unit` bytes can be put into a slot by themselves."""

    file: Path
    begin: int
    end: int
    unit: int = 1


Fill = Callable[[int, int, int, int, memoryview], None]
"""Function that puts a piece of a matrix into a slot: layer, slot, number of the matrix in its expert, place of the piece in the
matrix, and its bytes. It runs on a worker's thread, and raises CheckpointError if the bytes are no weights."""


class _OpenFile:
    """File whose reads go past the page cache, and fail if the file is no longer as it was when it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.number, self._is_direct = self._open()
            self._state = self._now()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error

    def _open(self) -> tuple[int, bool]:
        with contextlib.suppress(OSError, AttributeError):  # not on every file system, nor on every platform
            number = os.open(self.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            with mmap.mmap(-1, PAGE) as page, contextlib.suppress(OSError):
                os.preadv(number, [page], 0)
                return number, True
            os.close(number)
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC), False

    def _now(self) -> tuple[int, int]:
        state = os.fstat(self.number)
        return state.st_size, state.st_mtime_ns

    def read(self, memory: memoryview, begin: int, needed: int) -> None:
        """Read from byte `begin` into `memory`, at least `needed`. Raises WeightsLost if the file has changed or is too short,
        OSError if it cannot be read."""
        filled, size = 0, 1
        while filled < needed and size:
            size = os.preadv(self.number, [memory[filled:]], begin + filled)
            if not self._is_direct:
                with contextlib.suppress(
                    OSError, AttributeError
                ):  # else the page cache would take memory that is not lent
                    os.posix_fadvise(self.number, begin + filled, size, os.POSIX_FADV_DONTNEED)
            filled += size
        if self._now() != self._state or filled < needed:
            raise WeightsLost(f"{self.path} was changed or cut short while experts were read from it")

    def close(self) -> None:
        """Close the file."""
        os.close(self.number)


@dataclass(eq=False)
class _Read:
    """Read of one expert into a slot, until all its matrices are there."""

    layer: LayerSlots
    expert: int
    slot: int
    left: int  # matrices


@dataclass(eq=False)
class _MatrixRead:
    """Read of one matrix in pieces: the first byte of the next one, and the number of those that are not in the slot yet."""

    read: _Read
    number: int
    file: _OpenFile
    place: ByteRange
    next: int = field(init=False)
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.piece_bytes = PIECE_BYTES // self.place.unit * self.place.unit
        self.next = self.place.begin
        self.left = -(-(self.place.end - self.place.begin) // self.piece_bytes)


HITS_EXPONENT = 0.5


def expected_hits(slots: int, experts: int) -> float:
    """Return the share of chosen experts that a pass finds in memory, by recency; measured on a trained mixture of 32 experts."""
    return float(min(1.0, slots / experts) ** HITS_EXPONENT)


def buffer_bytes(workers: int = WORKERS) -> int:
    """Return the memory of reads besides the slots."""
    return workers * (PIECE_BYTES + 2 * PAGE)


class ExpertSlots:
    """Slots for experts of all layers of a span, and the workers that fill them. Passes use it from one thread, by `layers`.

    Args:
        experts: For each layer and each of its experts the places of its matrices, all layers' in the same order.
        slots: Number of slots of a layer.
        fill: Puts a matrix into a slot.
        workers: Number of threads that read.
        timeout_s: Longest wait for the disk in seconds.

    Raises:
        CheckpointError: A file cannot be opened, or a unit of a matrix is larger than a piece.

    Attributes:
        hits: Experts that passes found in slots.
        misses: Experts that passes wanted and did not find.
        is_fixed: Whether `LayerSlots.found` leaves the slots as they are.
        is_on_card: Whether passes go on without experts that they miss.
        active: Experts that a position chooses.
        way_back: Held while a matrix in a slot is used for a gradient.
        reads: Experts that were read.
        read_bytes: Their bytes.
        busy_s: Seconds during which experts were read.
        buffer_bytes: Memory of reads besides the slots.
    """

    def __init__(
        self,
        experts: Sequence[Sequence[Sequence[ByteRange]]],
        slots: int,
        fill: Fill,
        *,
        workers: int = WORKERS,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.is_fixed, self.is_on_card = False, False
        self.way_back, self.active = threading.Lock(), 1
        self.misses = 0
        self.hits = self.reads = self.read_bytes = 0
        self.busy_s = self._busy_since_s = 0.0
        self._reading = 0  # experts
        self._fill: Fill | None = fill
        self.timeout_s = timeout_s
        places = [place for layer in experts for expert in layer for place in expert]
        self._files = {path: _OpenFile(path) for path in {place.file for place in places}}
        if (largest := max(places, key=lambda place: place.unit)).unit > PIECE_BYTES:
            raise CheckpointError(f"{largest.file}: rows of its experts are too long to be read from the disk")
        self.buffer_bytes = buffer_bytes(workers)
        self._workers = workers
        self._begin()
        self._failure: WeightsLost | None = None
        self._late: tuple[LayerSlots, int] | None = None
        self._closed = False
        self.layers = [LayerSlots(self, number, layer, slots) for number, layer in enumerate(experts)]

    def _begin(self) -> None:
        """Begin without workers, also in a child process that tries graphs: it has none of its parent's threads."""
        self._process, self._threads = os.getpid(), list[threading.Thread]()
        self._lock = threading.Lock()
        self._more, self._done = threading.Condition(self._lock), threading.Condition(self._lock)
        self._queue: deque[_MatrixRead] = deque()

    @property
    def is_usable(self) -> bool:
        """Whether experts can still be read."""
        return self._failure is None and not self._closed

    def expected_wait_s(self, positions: int) -> float:
        """Return the seconds that a pass of `positions` new positions is expected to wait for the disk, at the speed of the reads
        so far; 0 if nothing was read."""
        if not self.read_bytes:
            return 0.0
        missed_bytes = sum(layer.expected_misses(positions) * layer.expert_bytes for layer in self.layers)
        return missed_bytes * self.busy_s / self.read_bytes

    def close(self) -> None:
        """End the workers, give up the memory of the slots, and close the files unless the disk keeps a worker waiting."""
        with self._lock:
            self._closed = True
            self._fill = None  # layers and their pool refer to one another, and would keep the slots until a collection
            self._queue.clear()
            self._more.notify_all()
            self._done.notify_all()
            threads = self._threads.copy()
        for thread in threads:
            thread.join(timeout=1.0)
        if not any(thread.is_alive() for thread in threads):
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _put(self, read: _Read, places: Sequence[ByteRange]) -> None:
        """Queue a read, and start the workers if it is the first. The lock is held."""
        if not self._reading:
            self._busy_since_s = time.monotonic()
        self._reading += 1
        while len(self._threads) < self._workers:
            assert self._fill is not None
            self._threads.append(
                threading.Thread(target=self._work, args=(self._fill,), name="read experts", daemon=True)
            )
            self._threads[-1].start()
        for number, place in enumerate(places):
            self._queue.append(_MatrixRead(read, number, self._files[place.file], place))
        self._more.notify(len(places))

    def _work(self, fill: Fill) -> None:
        """Read pieces, and put them into their slots, until `close`."""
        buffer = memoryview(mmap.mmap(-1, PIECE_BYTES + 2 * PAGE))
        while True:
            with self._more:
                while not self._queue and not self._closed:
                    if not self._more.wait(IDLE_S) and not self._queue:
                        self._threads.remove(threading.current_thread())
                        return  # a pool that its owner lost ends so, too
                if self._closed:
                    return
                one = self._queue[0]
                begin, one.next = one.next, min(one.next + one.piece_bytes, one.place.end)
                end = one.next
                if end == one.place.end:
                    self._queue.popleft()
            failure: WeightsLost | None = None
            try:
                first = begin // PAGE * PAGE  # reads past the page cache take whole pages
                one.file.read(buffer[: -(-(end - first) // PAGE) * PAGE], first, end - first)
                piece = buffer[begin - first : end - first]
                fill(one.read.layer.number, one.read.slot, one.number, begin - one.place.begin, piece)
            except WeightsLost as error:
                failure = error
            except Exception as error:
                failure = WeightsLost(f"{one.file.path}: an expert could not be read: {error}")
            with self._lock:
                one.left -= 1
                if failure is not None:
                    self._failure = failure
                    self._queue.clear()
                    self._done.notify_all()
                elif not one.left:
                    self._settle(one)

    def _settle(self, one: _MatrixRead) -> None:
        """Note that a matrix is in its slot. The lock is held."""
        self.read_bytes += one.place.end - one.place.begin
        one.read.left -= 1
        if not one.read.left:
            self.reads += 1
            self._reading -= 1
            if not self._reading:
                self.busy_s += time.monotonic() - self._busy_since_s
            one.read.layer.reading.pop(one.read.expert)
            one.read.layer.ready[one.read.expert] = one.read.slot
            self._done.notify_all()

    def _wait(self, layer: LayerSlots, give_up_s: float) -> None:
        """Wait for a matrix. The lock is held.

        Raises WeightsLost if a read has failed, LocalError at the time `give_up_s`, or if an expert is missing that was given up
        before: then a pass that is tried again does not wait as long once more.
        """
        if self._closed:
            raise WeightsLost("the experts of this span are no longer read")
        if self._failure is not None:
            raise self._failure
        is_late = self._late is not None and self._late[1] in self._late[0].reading
        if is_late or not self._done.wait(give_up_s - time.monotonic()):
            if not is_late:
                self._late = layer, next(iter(layer.reading), -1)
            raise LocalError(
                f"the disk did not give an expert of layer {layer.number} within {self.timeout_s:.0f} s; see what else uses it, "
                "or run with --expert-disk off"
            )


class LayerSlots:
    """Slots of one layer. `ready` and `reading` have the slots of experts by their numbers. `elsewhere` experts are never asked
    for here, and `expert_bytes` are of the largest one."""

    def __init__(self, pool: ExpertSlots, number: int, places: Sequence[Sequence[ByteRange]], slots: int) -> None:
        self.number, self.experts = number, len(places)
        self.ready: dict[int, int] = {}
        self.reading: dict[int, int] = {}
        self.pool, self._places = pool, places
        self.slots = min(slots, len(places))
        self.elsewhere = 0
        self.expert_bytes = max(sum(place.end - place.begin for place in expert) for expert in places)
        self._free = list(range(self.slots))
        self._pass = 0
        self._last_use = [0] * len(places)
        self._uses = [0.0] * len(places)
        self._wanted: dict[int, int] = {}  # by the present pass, and not visited yet

    def visit(self, rows: Mapping[int, int], active: int = 1) -> Iterator[tuple[int, int]]:
        """Yield the number and the slot of each expert that `rows` of a pass choose, each `active` of them, those in memory first.
        The slot keeps the expert until the next one is asked for.

        Raises WeightsLost if the experts cannot be read, LocalError if the disk takes too long.
        """
        pool = self.pool
        if pool._process != os.getpid():
            pool._begin()
        with pool._lock:
            self._use(rows, active)
            self._wanted = dict(rows)
            self._read_wanted()
        try:
            while self._wanted:
                with pool._lock:
                    give_up_s = time.monotonic() + pool.timeout_s
                    while not (here := [one for one in self._wanted if one in self.ready]):
                        pool._wait(self, give_up_s)
                    expert, slot = here[0], self.ready[here[0]]
                yield expert, slot
                with pool._lock:
                    del self._wanted[expert]
                    self._read_wanted()
        finally:
            self._wanted = {}

    def expected_misses(self, positions: int) -> float:
        """Return the number of experts in no slot that a pass of `positions` new positions is expected to choose."""
        if not (experts := self.experts - self.elsewhere):
            return 0.0
        # Without the experts that no position chooses, if each chooses as many as the passes so far did
        chosen = experts * (1 - (1 - self.pool.active / self.experts) ** positions)
        share = self.slots / experts if self.pool.is_fixed else expected_hits(self.slots, experts)
        return chosen * (1 - min(1.0, share))

    def found(self, rows: Mapping[int, int], active: int = 1) -> dict[int, int]:
        """Return the slots of the experts in memory that `rows` of a pass choose, each `active` of them, without waiting. They
        stay there until the next call.

        Unless the pool is fixed or a read of this layer is on its way, the most used one of the others is read meanwhile. It takes
        the slot of the least used one if it has been used more. Uses count half as much after HALF_LIFE passes.
        Raises WeightsLost if the experts cannot be read.
        """
        pool = self.pool
        with pool._lock:
            if pool._failure is not None:
                raise pool._failure
            self._use(rows, active)
            if self._pass % HALF_LIFE == 0:
                self._uses = [uses / 2 for uses in self._uses]
            here = {expert: self.ready[expert] for expert in rows if expert in self.ready}
            missing, unneeded = rows.keys() - here.keys(), self.ready.keys() - here.keys()
            if missing and unneeded and not pool.is_fixed and not self.reading and pool.is_usable:
                wanted = max(missing, key=lambda expert: (self._uses[expert], -expert))
                victim = min(unneeded, key=lambda expert: (self._uses[expert], -expert))
                if self._uses[wanted] > self._uses[victim]:
                    self._free.append(self.ready.pop(victim))
                    self._read(wanted)
            return here

    def fill(self) -> None:
        """Read experts into all slots, the first ones by their numbers, before any pass. Raises as `visit` does."""
        for _ in self.visit(dict.fromkeys(range(self.slots), 0)):
            pass
        self.pool.hits = self.pool.misses = self.pool.reads = self.pool.read_bytes = 0

    def _use(self, rows: Mapping[int, int], active: int) -> None:
        """Note the use of experts by a pass. The pool's lock is held."""
        self._pass += 1
        self.pool.active = active
        for expert, count in rows.items():
            self._last_use[expert], self._uses[expert] = self._pass, self._uses[expert] + count
        found = sum(expert in self.ready for expert in rows)
        self.pool.hits, self.pool.misses = self.pool.hits + found, self.pool.misses + len(rows) - found

    def slot_of(self, expert: int) -> int:
        """Return the slot of one expert, after reading it if it is in none. Raises as `visit` does."""
        return next(slot for _, slot in self.visit({expert: 1}))

    def _read_wanted(self) -> None:
        """Begin to read wanted experts that are in no slot, as long as slots are free for them. The pool's lock is held."""
        missing = [expert for expert in self._wanted if expert not in self.ready and expert not in self.reading]
        for expert in missing if self.pool.is_usable else ():
            if not self._free:
                unneeded = [other for other in self.ready if other not in self._wanted]
                if not unneeded:
                    return
                victim = min(unneeded, key=lambda other: (self._last_use[other], self._uses[other], -other))
                self._free.append(self.ready.pop(victim))
            self._read(expert)

    def _read(self, expert: int) -> None:
        """Begin to read an expert into a free slot. The pool's lock is held."""
        self.reading[expert] = slot = self._free.pop()
        self.pool._put(_Read(self, expert, slot, len(self._places[expert])), self._places[expert])
