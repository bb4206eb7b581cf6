"""OutstandingLeases: attempts at microbatches, from when one is given to a trainer until its microbatch is free again, or done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.wiring import Wire


@dataclass(eq=False)
class OutstandingLease:
    """One attempt at microbatch `number` of the step, along a route. Times in seconds of the coordinator's clock.

    `releasing`: the stages that have not yet forgotten it since it was called back. `suspects`: who may be why it failed;
    None as long as that is to be seen from who has counted it.
    """

    lease: int
    number: int
    route: tuple[Wire, ...]
    trainer: PeerId = ""
    given_at_s: float = 0.0
    until_s: float = float("inf")
    called_back: bool = False
    releasing: set[PeerId] = field(default_factory=set)
    suspects: frozenset[PeerId] | None = None

    def passes(self, peer: PeerId) -> bool:
        """Whether a stage is on its route."""
        return any(hop == peer for hop, _ in self.route)


class OutstandingLeases:
    """All that are not over. A microbatch is free again once every live stage of the old route has said what it counted and
    forgot the rest."""

    def __init__(self) -> None:
        self._records: dict[int, OutstandingLease] = {}

    def __repr__(self) -> str:
        return f"<OutstandingLeases {len(self.out)} out, {len(self) - len(self.out)} called back>"

    def __iter__(self) -> Iterator[OutstandingLease]:
        return iter(list(self._records.values()))

    def __len__(self) -> int:
        """How many are out or not yet called back."""
        return len(self._records)

    @property
    def out(self) -> list[OutstandingLease]:
        """Those at work."""
        return [record for record in self if not record.called_back]

    @property
    def numbers(self) -> set[int]:
        """Microbatches that must not be leased now."""
        return {record.number for record in self}

    def held_by(self, trainer: PeerId) -> list[OutstandingLease]:
        """Those that a trainer is at work on."""
        return [record for record in self.out if record.trainer == trainer]

    def find(self, lease: int, trainer: PeerId) -> OutstandingLease | None:
        """The one of this number that is at work; None where it is another trainer's, or none."""
        record = self._records.get(lease)
        return record if record is not None and record.trainer == trainer and not record.called_back else None

    def add(self, record: OutstandingLease) -> None:
        """It is granted."""
        self._records[record.lease] = record

    def done(self, record: OutstandingLease) -> None:
        """It is over."""
        self._records.pop(record.lease, None)

    def call_back(self, record: OutstandingLease, peers: set[PeerId]) -> bool:
        """Wait until each of `peers` has released it; True where there is nobody to wait for."""
        record.called_back, record.releasing = True, set(peers)
        if not peers:
            self.done(record)
        return not peers

    def released(self, lease: int, peer: PeerId) -> OutstandingLease | None:
        """A stage has forgotten a lease; the lease, where it was the last one."""
        record = self._records.get(lease)
        if record is None or not record.called_back:
            return None
        record.releasing.discard(peer)
        if record.releasing:
            return None
        self.done(record)
        return record

    def clear(self) -> None:
        """Begin anew."""
        self._records.clear()
