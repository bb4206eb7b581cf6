"""Leases that are out, and those being called back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.wiring import Wire


@dataclass(frozen=True)
class OutstandingLease:
    """One attempt at microbatch `number` of the step, along a route."""

    lease: int
    number: int
    route: tuple[Wire, ...]


class OutstandingLeases:
    """A microbatch is free again once every live stage of the old route has said what it counted and forgot the rest."""

    def __init__(self) -> None:
        self._out: dict[int, OutstandingLease] = {}
        self._releasing: dict[int, tuple[OutstandingLease, set[PeerId]]] = {}

    def __repr__(self) -> str:
        return f"<OutstandingLeases {len(self._out)} out, {len(self._releasing)} called back>"

    def __iter__(self) -> Iterator[OutstandingLease]:
        return iter(list(self._out.values()))

    def __len__(self) -> int:
        """How many are out or not yet called back."""
        return len(self._out) + len(self._releasing)

    @property
    def numbers(self) -> set[int]:
        """Microbatches that must not be leased now."""
        outstanding_leases = [*self._out.values(), *(outstanding for outstanding, _ in self._releasing.values())]
        return {outstanding.number for outstanding in outstanding_leases}

    def add(self, outstanding: OutstandingLease) -> None:
        self._out[outstanding.lease] = outstanding

    def done(self, lease: int) -> OutstandingLease | None:
        """The grant that is done; None where it was called back before."""
        return self._out.pop(lease, None)

    def call_back(self, lease: int, peers: set[PeerId]) -> None:
        """Wait until each of `peers` has released it."""
        outstanding = self._out.pop(lease)
        if peers:
            self._releasing[lease] = (outstanding, peers)

    def released(self, lease: int, peer: PeerId) -> None:
        """A stage has forgotten a lease."""
        if lease in self._releasing:
            peers = self._releasing[lease][1]
            peers.discard(peer)
            if not peers:
                del self._releasing[lease]

    def lose(self, peer: PeerId) -> None:
        """A stage is gone: nothing more is expected of it."""
        for lease in list(self._releasing):
            self.released(lease, peer)

    def clear(self) -> None:
        """Begin anew."""
        self._out.clear()
        self._releasing.clear()
