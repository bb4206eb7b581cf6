"""The ledger of one training step: which microbatch is counted where, so that each counts exactly once for every unit.

A microbatch is counted for a unit once its gradient is in the accumulator of a live replica of that unit. A replica that
dies takes its counts with it; they are then missing, and the microbatch is sent again: through the replicas that have
counted it for their units, which add nothing, and through any others for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.view import Span


@dataclass
class Holding:
    """What one live replica has counted: per unit of its span, a bit for each microbatch."""

    span: Span
    masks: dict[int, int] = field(default_factory=dict)

    def mask(self, unit: int) -> int:
        """The bits of a unit; none of one that it does not hold."""
        return self.masks.get(unit, 0)


class StepLedger:
    """Counts of one step of `microbatches` microbatches over a model of `units` units."""

    def __init__(self, step: int, units: int, microbatches: int) -> None:
        self.step = step
        self.units = units
        self.microbatches = microbatches
        self.everything = (1 << microbatches) - 1
        self._holdings: dict[PeerId, Holding] = {}

    def __repr__(self) -> str:
        left = len(self.missing())
        return f"<StepLedger of step {self.step}: {self.microbatches - left} of {self.microbatches} counted everywhere>"

    @property
    def peers(self) -> Mapping[PeerId, Holding]:
        """The live replicas that take part."""
        return self._holdings

    def report(self, peer: PeerId, span: Span, masks: Mapping[int, int]) -> None:
        """What a replica says that it has counted, by unit; replaces what was known of it."""
        self._holdings[peer] = Holding(span, {unit: masks[unit] for unit in range(*span) if masks.get(unit)})

    def count(self, peer: PeerId, span: Span, number: int) -> None:
        """A microbatch went through these units of a replica, and back."""
        holding = self._holdings.get(peer)
        if holding is not None:
            for unit in range(max(span.start, holding.span.start), min(span.end, holding.span.end)):
                holding.masks[unit] = holding.mask(unit) | 1 << number

    def lose(self, peer: PeerId) -> None:
        """A replica is gone, with all that it had counted."""
        self._holdings.pop(peer, None)

    def missing(self) -> list[int]:
        """Microbatches that some unit has not counted."""
        counted = self.everything
        for unit in range(self.units):
            counted &= self._union(unit)
        return [number for number in range(self.microbatches) if not counted >> number & 1]

    def complete(self) -> bool:
        """Whether every unit has counted every microbatch."""
        return all(self._union(unit) == self.everything for unit in range(self.units))

    def _union(self, unit: int) -> int:
        union = 0
        for holding in self._holdings.values():
            union |= holding.mask(unit)
        return union

    def counters(self, number: int) -> list[PeerId | None]:
        """For each unit, the replica that has counted this microbatch, or None."""
        found: list[PeerId | None] = [None] * self.units
        for peer, holding in self._holdings.items():
            for unit, mask in holding.masks.items():
                if mask >> number & 1:
                    found[unit] = peer
        return found

    def conflicts(self) -> list[PeerId]:
        """Replicas to discard so that nothing is counted twice: of two that counted the same, the one with fewer counts."""
        order = sorted(self._holdings, key=lambda peer: (-self._weight(peer), peer))
        taken = [0] * self.units
        losers: list[PeerId] = []
        for peer in order:
            masks = self._holdings[peer].masks
            if any(taken[unit] & mask for unit, mask in masks.items()):
                losers.append(peer)
                continue
            for unit, mask in masks.items():
                taken[unit] |= mask
        return losers

    def _weight(self, peer: PeerId) -> int:
        return sum(mask.bit_count() for mask in self._holdings[peer].masks.values())

    def counts(self, peer: PeerId, units: Sequence[int]) -> int:
        """How many microbatches a replica has counted for one of these units, at most; 0 for a listener. Who holds both ends of the
        model adds to what they share though all microbatches came in elsewhere."""
        holding = self._holdings.get(peer)
        if holding is None:
            return 0
        held = (unit for unit in units if holding.span.start <= unit < holding.span.end)
        return max((holding.mask(unit).bit_count() for unit in held), default=0)
