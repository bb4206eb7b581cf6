"""The memory of a device, or of the host: what is promised to whom, so that nobody takes memory that is not there.

Pure counting: who wants memory reserves it first, keeps the `Reservation` beside what it allocates, and gives it back with
it. Where there is no room `Full` is raised, which is answered as BUSY: what is refused is the new, never what goes on already.
A process has one ledger for the host and one for its device; where it computes on the CPU they are the same.
What each account holds is told in docs/decisions/memory-ledger.md.
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
    """What memory is for; the value is its name in metrics and `status`."""

    WEIGHTS = "weights"
    ADAPTERS = "adapters"  # small changes to the weights, which sessions ask for
    KV_CACHE = "kv_cache"
    JOURNALS = "journals"  # what hops keep to send again
    MESSAGES = "messages"  # of links: their buffers, payloads that somebody keeps, and what has not left yet
    ACTIVATIONS = "activations"  # of the passes that run, and what training keeps for its way back
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    TOKENIZER = "tokenizer"  # for texts that follow a grammar
    AVERAGING = "averaging"  # buffers of all-reduces
    CHECKPOINTS = "checkpoints"  # copies of states, until they are on the disk


class Full(Busy):
    """The ledger has no room for what was asked. When to ask again is `retry_s`."""


class MemoryLedger:
    """Reservations against a limit, by account. May be used from any thread.

    `limit_bytes` None: everything is counted and nothing refused. It may be changed; below what is reserved already it refuses
    whatever is new until enough was given back.
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
        )  # a reservation may be given back by the garbage collector, wherever that strikes

    def __repr__(self) -> str:
        limit = "no limit" if self._limit_bytes is None else f"{self._limit_bytes / 1e6:.1f} MB"
        held = ", ".join(f"{account.value} {size / 1e6:.1f}" for account, size in self.accounts().items() if size)
        return f"<MemoryLedger {self.name}: {self._used_bytes / 1e6:.1f} MB of {limit}{f' ({held})' if held else ''}>"

    @property
    def limit_bytes(self) -> int | None:
        """What all accounts together may hold."""
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int | None) -> None:
        with self._lock:
            self._limit_bytes = limit_bytes

    @property
    def used_bytes(self) -> int:
        """What is reserved."""
        return self._used_bytes

    @property
    def free_bytes(self) -> float:
        """What may still be reserved, never below 0; infinite without a limit."""
        return float("inf") if self._limit_bytes is None else max(0, self._limit_bytes - self._used_bytes)

    def accounts(self) -> dict[Account, int]:
        """What is reserved, by account."""
        with self._lock:
            return dict(self._accounts)

    def readings(self) -> Readings:
        """What Prometheus may know of it."""
        for account, size_bytes in self.accounts().items():
            yield Reading(table.MEMORY_RESERVED, size_bytes, (self.name, account.value))
        yield Reading(table.MEMORY_PEAK, self.peak_bytes, (self.name,))
        yield Reading(table.MEMORY_LIMIT, self._limit_bytes or 0, (self.name,))

    def reserve(self, account: Account, size_bytes: int) -> Reservation:
        """Promise memory. Raises Full, having changed nothing."""
        reservation = Reservation(self, account)
        reservation.resize(size_bytes)
        return reservation

    def count(self, account: Account, size_bytes: int = 0) -> Reservation:
        """Write down what cannot be refused any more, even beyond the limit: it is then others who find no room."""
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
    """Memory promised to somebody, until `release`. As a context manager it is released at the end."""

    __slots__ = ("_ledger", "account", "size_bytes")

    def __init__(self, ledger: MemoryLedger, account: Account) -> None:
        self._ledger = ledger
        self.account = account
        self.size_bytes = 0

    def __repr__(self) -> str:
        return f"<Reservation of {self.size_bytes} bytes for {self.account.value}>"

    def resize(self, size_bytes: int) -> None:
        """Have so many bytes from now on. Raises Full where that is more than there is, and keeps what it had."""
        self._set(size_bytes, refuse=size_bytes > self.size_bytes)

    def count(self, size_bytes: int) -> None:
        """Have so many bytes from now on, even beyond the limit: for what cannot be refused any more."""
        self._set(size_bytes, refuse=False)

    def _set(self, size_bytes: int, *, refuse: bool) -> None:
        if size_bytes < 0:
            raise ValueError(f"a reservation of {size_bytes} bytes")
        with self._ledger._lock:
            self._ledger._change(self.account, size_bytes - self.size_bytes, refuse=refuse)
            self.size_bytes = size_bytes

    def release(self) -> None:
        """Give everything back. Safe to call twice."""
        self.count(0)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
