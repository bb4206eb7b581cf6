"""The memory ledger of a device or of the host: reservations by account, so that nothing takes memory that is not free.

Pure counting: code that needs memory reserves it first, keeps the `Reservation` beside the allocation, and releases both together.
If there is no room, `Full` is raised and answered as BUSY: new work is refused, running work never. A process has one ledger for
the host and one for its device; if it computes on the CPU they are the same. docs/decisions/memory-ledger.md lists the contents of
each account.
"""

from __future__ import annotations

import threading
from enum import Enum
from types import TracebackType

from swarmnode.errors import Busy
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings

RETRY_S = 2.0


class Account(str, Enum):
    """Purpose of reserved memory; the value is its name in metrics and `status`."""

    WEIGHTS = "weights"
    ADAPTERS = "adapters"  # small changes to the weights, which sessions ask for
    KV_CACHE = "kv_cache"
    JOURNALS = "journals"  # messages that hops keep to send again
    MESSAGES = "messages"  # of links: their buffers, payloads still in use, and messages not sent yet
    ACTIVATIONS = "activations"  # of running passes, and those saved for the backward pass
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    TOKENIZER = "tokenizer"  # for texts that follow a grammar
    AVERAGING = "averaging"  # buffers of all-reduces
    CHECKPOINTS = "checkpoints"  # copies of states, until they are on the disk


class Full(Busy):
    """The ledger has no room for the reservation. `retry_s` says after how many seconds asking again is worth it."""


class MemoryLedger:
    """Memory reservations against a limit, by account. Usable from any thread.

    If `limit_bytes` is None everything is counted and nothing refused. The limit may change; if it falls below the reserved bytes,
    new reservations are refused until enough has been released.
    """

    def __init__(self, limit_bytes: int | None = None, *, name: str = "host", retry_s: float = RETRY_S) -> None:
        self.name = name
        self.retry_s = retry_s
        self.peak_bytes = 0
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._accounts = dict.fromkeys(Account, 0)
        self._lock = (
            threading.RLock()
        )  # the garbage collector may release a reservation at any point, also under this lock

    def __repr__(self) -> str:
        limit = "no limit" if self._limit_bytes is None else f"{self._limit_bytes / 1e6:.1f} MB"
        held = ", ".join(f"{account.value} {size / 1e6:.1f}" for account, size in self.accounts().items() if size)
        return f"<MemoryLedger {self.name}: {self._used_bytes / 1e6:.1f} MB of {limit}{f' ({held})' if held else ''}>"

    @property
    def limit_bytes(self) -> int | None:
        """Largest sum of all accounts in bytes; None without a limit."""
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int | None) -> None:
        with self._lock:
            self._limit_bytes = limit_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes reserved in all accounts."""
        return self._used_bytes

    @property
    def free_bytes(self) -> float:
        """Bytes that can still be reserved, at least 0; infinite without a limit."""
        return float("inf") if self._limit_bytes is None else max(0, self._limit_bytes - self._used_bytes)

    def accounts(self) -> dict[Account, int]:
        """Return the reserved bytes of each account."""
        with self._lock:
            return dict(self._accounts)

    def readings(self) -> Readings:
        """Yield the ledger's metrics: bytes reserved by account, their peak and the limit (0 if there is none)."""
        for account, size_bytes in self.accounts().items():
            yield Reading(table.MEMORY_RESERVED, size_bytes, (self.name, account.value))
        yield Reading(table.MEMORY_PEAK, self.peak_bytes, (self.name,))
        yield Reading(table.MEMORY_LIMIT, self._limit_bytes or 0, (self.name,))

    def reserve(self, account: Account, size_bytes: int) -> Reservation:
        """Reserve `size_bytes`. Raises Full if they do not fit; nothing is reserved then."""
        reservation = Reservation(self, account)
        reservation.resize(size_bytes)
        return reservation

    def count(self, account: Account, size_bytes: int = 0) -> Reservation:
        """Reserve `size_bytes` even beyond the limit, for memory that cannot be refused any more; later reservations find less
        room."""
        reservation = Reservation(self, account)
        reservation.count(size_bytes)
        return reservation

    def _change(self, account: Account, by_bytes: int, *, refuse: bool) -> None:
        with self._lock:
            if refuse and by_bytes > self.free_bytes:
                raise Full(
                    f"the {self.name} has no room for {by_bytes / 1e6:.1f} MB of {account.value}: "
                    f"{self._used_bytes / 1e6:.1f} MB of {(self._limit_bytes or 0) / 1e6:.1f} MB are taken",
                    retry_s=self.retry_s,
                )
            self._accounts[account] += by_bytes
            self._used_bytes += by_bytes
            self.peak_bytes = max(self.peak_bytes, self._used_bytes)


class Reservation:
    """Bytes reserved in a ledger until `release`. Leaving its `with` block releases it."""

    __slots__ = ("_ledger", "account", "size_bytes")

    def __init__(self, ledger: MemoryLedger, account: Account) -> None:
        self._ledger = ledger
        self.account = account
        self.size_bytes = 0

    def resize(self, size_bytes: int) -> None:
        """Change the reservation to `size_bytes`. Raises Full, changing nothing, if it grows by more than is free; ValueError if
        negative."""
        self._set(size_bytes, refuse=size_bytes > self.size_bytes)

    def count(self, size_bytes: int) -> None:
        """Change the reservation to `size_bytes` even beyond the limit, for memory that cannot be refused any more. Raises
        ValueError if negative."""
        self._set(size_bytes, refuse=False)

    def _set(self, size_bytes: int, *, refuse: bool) -> None:
        if size_bytes < 0:
            raise ValueError(f"a reservation of {size_bytes} bytes")
        with self._ledger._lock:
            self._ledger._change(self.account, size_bytes - self.size_bytes, refuse=refuse)
            self.size_bytes = size_bytes

    def release(self) -> None:
        """Release all bytes. Calling it again changes nothing."""
        self.count(0)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
