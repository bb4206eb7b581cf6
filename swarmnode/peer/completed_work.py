"""What this peer has done for others and has no receipt for yet, by session or microbatch: the most that a receipt may say."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MAX_IDS = 8192  # that are remembered; the oldest go first, and with them the credit for what nobody has signed


class CompletedWork:
    """Of one peer. Work is units times tokens (samples, where a model has no tokens), by a session's id or a lease's seal."""

    def __init__(self) -> None:
        self.total = 0
        self.receipted = 0
        self._unconfirmed: OrderedDict[bytes, int] = OrderedDict()

    def __repr__(self) -> str:
        return f"<CompletedWork {self.receipted} of {self.total} receipted, {len(self._unconfirmed)} ids wait>"

    def note(self, work: bytes, unit_tokens: int) -> None:
        """More was done under this id."""
        self.total += unit_tokens
        self._unconfirmed[work] = self._unconfirmed.get(work, 0) + unit_tokens
        if len(self._unconfirmed) > MAX_IDS:
            self._unconfirmed.popitem(last=False)

    def unconfirmed(self, works: Iterable[bytes]) -> int:
        """What was done under these ids and nobody has signed for."""
        return sum(self._unconfirmed.get(work, 0) for work in set(works))

    def confirm(self, works: Iterable[bytes], unit_tokens: int) -> None:
        """A receipt for these ids says so much; more than that is nobody's."""
        self.receipted += unit_tokens
        for work in works:
            self._unconfirmed.pop(work, None)
