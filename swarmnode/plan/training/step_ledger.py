"""The ledger of one training step: the lease of each microbatch, and the replicas that have counted it.

A microbatch is counted for a layer once its gradient is in the accumulator of a live replica of that layer. A replica that
dies takes its counts with it; they are then missing, and the microbatch is leased again: through the replicas that have
counted it for their layers, which add nothing, and through any others for the rest.

A lease is granted, then done, or called back and released by every live stage of its route. Until then its microbatch is not
leased again, for only then the counts tell all that came of it: so each microbatch counts exactly once for every layer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_, or_

from swarmnode.codec.training_messages import LARGEST_LOSS
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.view import Span


@dataclass
class Holding:
    """Microbatches that one live replica (a peer's stage) has counted: a bit mask for each of its layers."""

    span: Span
    masks: dict[int, int] = field(default_factory=dict)

    def mask(self, unit: int) -> int:
        """Return the bit mask of the microbatches counted for a layer; 0 if the replica does not hold the layer."""
        return self.masks.get(unit, 0)


@dataclass(eq=False)
class OutstandingLease:
    """Attempt of `trainer` at microbatch `number` of the step, along a route. Times in seconds of the coordinator's clock.

    `releasing`: the stages that have not yet forgotten the lease since it was called back. `suspects`: the peers that may
    have caused its failure; None while the counts of the stages are to show that. `failed_at`, `code`: the stage that failed
    and its reason, as reported by the trainer; empty if the trainer names none. `claimed`: a stage has reported NaN in the
    microbatch.
    """

    lease: int
    number: int
    route: tuple[tuple[PeerId, Span], ...]
    trainer: PeerId = ""
    issued_at_s: float = 0.0
    until_s: float = math.inf
    called_back: bool = False
    releasing: set[PeerId] = field(default_factory=set)
    suspects: frozenset[PeerId] | None = None
    failed_at: PeerId = ""
    code: int = 0
    claimed: bool = False

    @property
    def stages(self) -> tuple[PeerId, ...]:
        """Peers of the route, in order."""
        return tuple(peer for peer, _ in self.route)

    def passes(self, peer: PeerId) -> bool:
        """Return whether `peer` is on the route of the leased microbatch."""
        return peer in self.stages


class StepLedger:
    """Leases and counts of the microbatches `numbers` of one step over a model of `units` layers. Those below `trained` give
    gradients (None: all); the others are held-out ones that go forward only."""

    def __init__(self, step: int, units: int, numbers: range, trained: int | None = None) -> None:
        self.step = step
        self.units = units
        self.microbatches = len(numbers)
        self.trained = numbers.stop if trained is None else trained
        self.everything = (1 << numbers.stop) - (1 << numbers.start)
        self.holdings: dict[PeerId, Holding] = {}  # the live replicas that take part
        self._losses: dict[int, float] = {}
        self._expert_loads: dict[int, float] = {}
        self._leases: dict[int, OutstandingLease] = {}

    def __repr__(self) -> str:
        counted = self.microbatches - len(self.missing())
        return f"<StepLedger of step {self.step}: {counted} of {self.microbatches} counted everywhere, {len(self._leases)} leases>"

    # -- leases

    @property
    def leases(self) -> list[OutstandingLease]:
        """Leases of microbatches that are neither finished nor released."""
        return list(self._leases.values())

    @property
    def out(self) -> list[OutstandingLease]:
        """Leases that are still valid: given out and not called back."""
        return [lease for lease in self._leases.values() if not lease.called_back]

    def held_by(self, trainer: PeerId) -> list[OutstandingLease]:
        """Return the leases that a trainer is at work on."""
        return [lease for lease in self.out if lease.trainer == trainer]

    def find(self, lease: int, trainer: PeerId) -> OutstandingLease | None:
        """Return the lease of this number; None if it is over, called back, or another trainer's."""
        found = self._leases.get(lease)
        return found if found is not None and found.trainer == trainer and not found.called_back else None

    def lease(self, number: int) -> OutstandingLease | None:
        """Return the lease with this number; None if it was never given out or is over."""
        return self._leases.get(number)

    def free(self) -> list[int]:
        """Return the microbatches that can be leased: some layer has not counted them, and they have no lease."""
        leased = {lease.number for lease in self._leases.values()}
        return [number for number in self.missing() if number not in leased]

    def grant(self, lease: OutstandingLease) -> None:
        """Record a lease that was given out."""
        self._leases[lease.lease] = lease

    def done(self, lease: OutstandingLease, loss: float, expert_load: float = 0.0) -> None:
        """End a lease whose microbatch came back: all stages of its route have counted it."""
        self._leases.pop(lease.lease, None)
        for peer, span in lease.route:
            self.count(peer, span, lease.number)
        self._losses[lease.number] = loss
        if expert_load > 0:  # not NaN
            self._expert_loads[lease.number] = expert_load

    def call_back(
        self, lease: OutstandingLease, stages: Collection[PeerId], suspects: frozenset[PeerId] | None = None
    ) -> None:
        """Call a lease back: it ends once each of `stages` has released it, at once if there are none. `suspects` may have made
        it fail."""
        lease.called_back, lease.releasing, lease.suspects = True, set(stages), suspects
        if not stages:
            self._leases.pop(lease.lease, None)

    def released(self, lease: int, peer: PeerId) -> OutstandingLease | None:
        """Note that the stage of `peer` has forgotten a lease. Returns the lease if no other stage still has to, else None."""
        found = self._leases.get(lease)
        if found is None or not found.called_back:
            return None
        found.releasing.discard(peer)
        return None if found.releasing else self._leases.pop(lease)

    def void(self) -> None:
        """Forget all leases of the step."""
        self._leases.clear()

    def around_the_gap(self, lease: OutstandingLease) -> frozenset[PeerId]:
        """Return the peers between which a lease stopped, its trainer included. Gradients come back hop by hop: of the last stage
        that has not counted it and the first one that has, one did not do its part. Empty if no stage has counted it."""
        peers = [lease.trainer, *(peer for peer, _ in lease.route)]
        counted = [False, *(self._has_counted(peer, span.start, lease.number) for peer, span in lease.route)]
        first = counted.index(True) if any(counted) else 0
        return frozenset(peers[first - 1 : first + 1] if first else ())

    def _has_counted(self, peer: PeerId, unit: int, number: int) -> bool:
        holding = self.holdings.get(peer)
        return holding is not None and bool(holding.mask(unit) >> number & 1)

    # -- counts

    @property
    def loss(self) -> float:
        """Mean over the microbatches with gradients whose loss is known; 0 if there are none."""
        known = [loss for number, loss in self._losses.items() if number < self.trained]
        return math.fsum(known) / max(1, len(known))

    @property
    def expert_load(self) -> float:
        """Mean over the microbatches whose load of the busiest expert is known; 0 if there are none."""
        return math.fsum(self._expert_loads.values()) / max(1, len(self._expert_loads))

    @property
    def held_out_loss(self) -> float | None:
        """Mean loss of the held-out microbatches; None if the step has none, or the loss of one is unknown."""
        known = [loss for number, loss in self._losses.items() if number >= self.trained]
        count = (self.everything >> self.trained).bit_count()
        return math.fsum(known) / count if known and len(known) == count else None

    def report(
        self, peer: PeerId, span: Span, masks: Mapping[int, int], losses: Sequence[float] = (), *, adds: bool = False
    ) -> None:
        """Note the microbatches that a replica says it has counted, by layer. They replace the known ones, or (`adds`) join them
        if these may be newer. `losses`: those of the microbatches counted for the last layer, in order."""
        told_losses = zip(_bits(masks.get(self.units - 1, 0)), losses, strict=False)
        self._losses.update((number, loss) for number, loss in told_losses if abs(loss) <= LARGEST_LOSS)
        known = self.holdings.get(peer) if adds else None
        told = Holding(span, {unit: masks[unit] for unit in range(*span) if masks.get(unit)})
        for unit, mask in known.masks.items() if known is not None else ():
            if span.start <= unit < span.end:
                told.masks[unit] = told.mask(unit) | mask
        self.holdings[peer] = told

    def count(self, peer: PeerId, span: Span, number: int) -> None:
        """Note that a microbatch went through these layers of a replica, and back. A replica that is lost counts nothing."""
        holding = self.holdings.get(peer)
        if holding is not None:
            for unit in range(max(span.start, holding.span.start), min(span.end, holding.span.end)):
                holding.masks[unit] = holding.mask(unit) | 1 << number

    def lose(self, peer: PeerId) -> None:
        """Forget a replica (the peer's stage) with the microbatches that it had counted."""
        self.holdings.pop(peer, None)

    def missing(self) -> list[int]:
        """Return the microbatches that some layer has not counted."""
        counted = reduce(and_, map(self._union, range(self.units)), self.everything)
        return _bits(self.everything & ~counted)

    def complete(self) -> bool:
        """Return whether every layer has counted every microbatch."""
        return all(self._union(unit) == self.everything for unit in range(self.units))

    def _union(self, unit: int) -> int:
        return reduce(or_, (holding.mask(unit) for holding in self.holdings.values()), 0)

    def counters(self, number: int) -> list[PeerId | None]:
        """Return for each layer the replica that has counted this microbatch, or None."""
        found: list[PeerId | None] = [None] * self.units
        for peer, holding in self.holdings.items():
            for unit, mask in holding.masks.items():
                if mask >> number & 1:
                    found[unit] = peer
        return found

    def conflicts(self) -> list[PeerId]:
        """Return the replicas to discard so that nothing is counted twice: of two that counted the same, the one with fewer
        counts."""
        order = sorted(self.holdings, key=lambda peer: (-self._weight(peer), peer))
        taken = [0] * self.units
        losers: list[PeerId] = []
        for peer in order:
            masks = self.holdings[peer].masks
            if any(taken[unit] & mask for unit, mask in masks.items()):
                losers.append(peer)
                continue
            for unit, mask in masks.items():
                taken[unit] |= mask
        return losers

    def _weight(self, peer: PeerId) -> int:
        return sum(mask.bit_count() for mask in self.holdings[peer].masks.values())

    def counts(self, peer: PeerId, units: Sequence[int]) -> int:
        """Return the number of microbatches with gradients that `peer` has counted, at that one of the layers `units` where it has
        counted most. 0 if it holds none of them or has reported no counts."""
        holding = self.holdings.get(peer)
        if holding is None:
            return 0
        held = (unit for unit in units if holding.span.start <= unit < holding.span.end)
        trained = (1 << self.trained) - 1
        return max(((holding.mask(unit) & trained).bit_count() for unit in held), default=0)


def _bits(mask: int) -> list[int]:
    """Return the numbers of the bits that are set in `mask`, lowest first."""
    return [number for number in range(mask.bit_length()) if mask >> number & 1]
