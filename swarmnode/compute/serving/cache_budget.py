"""What KV caches may take: promised by whoever lets sessions in, held by the pool, and in the ledger as the more of both."""

from __future__ import annotations

import threading
from enum import Enum

from swarmnode.errors import SwarmnodeError
from swarmnode.ledger import Account, Full, MemoryLedger


class OutOfCache(SwarmnodeError):
    """The cache budget has no room for the session. When to ask again is the caller's to say."""


class Claim(Enum):
    """Why memory is needed. The claims overlap: a promise is kept in buffers, and padding of some sessions' buffers makes
    room as soon as others need what they were promised. So the largest one counts, not the sum."""

    PROMISED = "promised"  # to sessions that were let in, by the loop
    RESERVED = "reserved"  # by sessions that the pool has opened, on the compute thread
    ALLOCATED = "allocated"  # by buffers, padding included


class CacheBudget:
    """At most `limit_bytes`. May be used from any thread; each claim is made by one."""

    def __init__(self, limit_bytes: int, ledger: MemoryLedger | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._ledger = ledger or MemoryLedger()
        self._reservation = self._ledger.count(Account.KV_CACHE)
        self._claims = dict.fromkeys(Claim, 0)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        claims = ", ".join(f"{size / 1e6:.1f} {claim.value}" for claim, size in self._claims.items())
        return f"<CacheBudget of {self.limit_bytes / 1e6:.1f} MB: {claims}>"

    def is_in(self, ledger: MemoryLedger) -> bool:
        """Whether what it takes is taken of this ledger."""
        return self._ledger is ledger

    def claimed(self, claim: Claim) -> int:
        """Bytes of one claim."""
        return self._claims[claim]

    @property
    def free_bytes(self) -> int:
        """What may still be promised."""
        most_bytes = max(self._claims.values())
        spare_bytes = most_bytes - self._claims[Claim.PROMISED]  # in the ledger already
        left_bytes = self.limit_bytes - self._claims[Claim.PROMISED]
        in_ledger_bytes = spare_bytes + self._ledger.free_bytes
        return max(0, int(min(left_bytes, in_ledger_bytes)))

    def claim(self, claim: Claim, size_bytes: int) -> None:
        """Need so many bytes from now on. Raises OutOfCache where the budget or the ledger has no room; nothing changes then."""
        with self._lock:
            before = self._claims[claim]
            if size_bytes > max(before, self.limit_bytes):
                raise OutOfCache(
                    f"{size_bytes / 1e6:.1f} MB of cache would be {claim.value}; there are {self.limit_bytes / 1e6:.1f} MB"
                )
            self._claims[claim] = size_bytes
            most_bytes = max(self._claims.values())
            try:
                self._reservation.resize(most_bytes)
            except Full as error:
                self._claims[claim] = before
                raise OutOfCache(str(error)) from None

    def close(self) -> None:
        """The caches are gone."""
        with self._lock:
            self._claims = dict.fromkeys(Claim, 0)
            self._reservation.release()
