"""Work of this peer for others that no receipt covers yet, by session or microbatch: the most that a receipt may claim."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MAX_IDS = 8192  # sessions and leases remembered; the oldest are dropped, and their unsigned work earns no credit


class CompletedWork:
    """Work of this peer in layers times tokens (samples if the model has no tokens), by the id of the session or the seal of the
    lease."""

    def __init__(self) -> None:
        self.total = 0
        self.receipted = 0
        self._unconfirmed: OrderedDict[bytes, int] = OrderedDict()

    def __repr__(self) -> str:
        return f"<CompletedWork {self.receipted} of {self.total} receipted, {len(self._unconfirmed)} ids wait>"

    def note(self, work: bytes, unit_tokens: int) -> None:
        """Add `unit_tokens` to the work done under the id `work`."""
        self.total += unit_tokens
        self._unconfirmed[work] = self._unconfirmed.get(work, 0) + unit_tokens
        if len(self._unconfirmed) > MAX_IDS:
            self._unconfirmed.popitem(last=False)

    def unconfirmed(self, works: Iterable[bytes]) -> int:
        """Return the work done under the ids `works` that no receipt covers yet."""
        return sum(self._unconfirmed.get(work, 0) for work in set(works))

    def confirm(self, works: Iterable[bytes], unit_tokens: int) -> None:
        """Record a receipt of `unit_tokens` for the ids `works` and drop these: the rest of their work earns no credit."""
        self.receipted += unit_tokens
        for work in works:
            self._unconfirmed.pop(work, None)
