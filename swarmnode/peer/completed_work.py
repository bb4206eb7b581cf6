"""Work of this peer for clients: the amount that no receipt covers yet, which is the most that a receipt may claim; and the part
for others than the owner."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from swarmnode.errors import LocalError
from swarmnode.net.fair_share import Recent
from swarmnode.net.identity import Identity
from swarmnode.net.interfaces import PeerId

MAX_IDS = 8192  # sessions and leases remembered; the oldest are dropped, and their unsigned work earns no credit


class CompletedWork:
    """Work of this peer by the id of the session or the seal of the lease, in units times tokens, and in positions (samples if the
    model has no tokens). `is_own` tells clients of this machine's owner, whose work is not work for others."""

    def __init__(self, is_own: Callable[[PeerId], bool] = lambda _client: False) -> None:
        self.answers = 0  # texts, or passes of a module
        self.total = 0
        self.receipted = 0
        self.positions = 0
        self.own_positions = 0
        self._is_own = is_own
        self._unconfirmed: Recent[bytes, int] = Recent(MAX_IDS)
        self._positions: Recent[bytes, int] = Recent(MAX_IDS)  # of works that may still turn out to be the owner's
        self._own: Recent[bytes, None] = Recent(MAX_IDS)  # works of the owner

    @property
    def positions_for_others(self) -> int:
        """Positions computed for clients that are not the owner's. Behind the first hop, a client is known by its receipt only:
        until then its work counts here."""
        return self.positions - self.own_positions

    def begin(self, work: bytes, client: PeerId) -> None:
        """Record that `client` asked for the work `work`."""
        if self._is_own(client):
            self._own_it(work)

    def answer(self, work: bytes) -> None:
        """Count one more answer, unless the work is known to be the owner's."""
        self.answers += work not in self._own

    def record(self, work: bytes, unit_tokens: int, positions: int) -> None:
        """Add `unit_tokens` and `positions` to the work done under the id `work`."""
        self.total += unit_tokens
        self.positions += positions
        if work in self._own:
            self.own_positions += positions
        else:
            self._positions[work] = self._positions.get(work, 0) + positions
        self._unconfirmed[work] = self._unconfirmed.get(work, 0) + unit_tokens

    def unconfirmed(self, works: Collection[bytes]) -> int:
        """Return the work done under the ids `works` that no receipt covers yet."""
        return sum(self._unconfirmed.get(work, 0) for work in set(works))

    def confirm(self, works: Collection[bytes], unit_tokens: int, client: PeerId) -> None:
        """Record a receipt of `unit_tokens` by `client` for the ids `works` and drop these: the rest of their work earns no
        credit."""
        self.receipted += unit_tokens
        is_own = self._is_own(client)
        for work in works:
            self._unconfirmed.pop(work, None)
            if is_own:
                self._own_it(work)
            self._positions.pop(work, None)

    def _own_it(self, work: bytes) -> None:
        self._own[work] = None
        self.own_positions += self._positions.pop(work, 0)


class HomePeers:
    """The peers of one home folder: nodes, clients and doors with a key there. Keys that change are read again."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._peer_ids: dict[tuple[Path, int], PeerId] = {}

    def __contains__(self, peer: object) -> bool:
        known = {}
        for path in self._home.glob("*.key"):
            with suppress(OSError, LocalError):  # the file is gone, or no key
                file = path, path.stat().st_mtime_ns
                known[file] = self._peer_ids.get(file) or Identity.from_bytes(path.read_bytes()).peer_id
        self._peer_ids = known
        return peer in self._peer_ids.values()
