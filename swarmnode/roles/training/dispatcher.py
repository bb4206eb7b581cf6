"""Dispatcher: gives the microbatches that are missing to trainers, along the best routes, and calls them back."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping

from swarmnode.codec.messages import HopSpec
from swarmnode.codec.training_messages import Failed, Lease, Release
from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.ledger import Ledger
from swarmnode.plan.wiring import wire
from swarmnode.roles.training.audience import Audience, TrainerLine
from swarmnode.roles.training.grants import Grant, Grants
from swarmnode.roles.training.member import Member, Standing

log = logging.getLogger(__name__)

LEASE_BITS = 22  # leases of one term


class Dispatcher:
    """Leases of one term. `members` and `audience` are the conductor's own, read whenever something is to be decided."""

    def __init__(self, term: int, units: int, members: Mapping[PeerId, Member], audience: Audience) -> None:
        self.grants = Grants()
        self.term = term
        self._units = units
        self._members = members
        self._audience = audience
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return f"<Dispatcher of term {self.term}, {self.grants!r}>"

    def dispatch(self, ledger: Ledger) -> None:
        """Lease every microbatch that is missing and free, as long as trainers and stages have room."""
        busy = self.grants.numbers
        usable = (member for member in self._members.values() if member.standing is Standing.USABLE)
        workers = {member.peer: member.worker for member in usable}
        depth = len(wire(self._units, workers, [None] * self._units, in_flight=1 << 30) or ())
        for number in ledger.missing():
            trainer = self._audience.free()
            if trainer is None:
                return
            if number in busy:
                continue
            route = wire(self._units, workers, ledger.counters(number), in_flight=depth + 1)
            if route is None:
                return
            grant = Grant((self.term << LEASE_BITS) + next(self._numbers), number, tuple(route))
            self._grant(trainer, grant, ledger.step)

    def _grant(self, trainer: TrainerLine, grant: Grant, step: int) -> None:
        self.grants.add(grant)
        self._book(grant, 1)
        trainer.leases.add(grant.lease)
        hops = tuple(HopSpec(peer, span.start, span.end) for peer, span in grant.route)
        trainer.send(Lease(self.term, grant.lease, step, grant.number, hops))

    def _book(self, grant: Grant, sign: int) -> None:
        for peer, span in grant.route:
            member = self._members.get(peer)
            if member is not None:
                member.worker.booked_units += sign * span.units
                member.worker.in_flight += sign

    def done(self, trainer: TrainerLine, lease: int) -> Grant | None:
        """A microbatch is back; None where it was called back before (the stages have said what they counted), or was another
        trainer's."""
        if lease not in trainer.leases:
            return None
        trainer.leases.remove(lease)
        grant = self.grants.done(lease)
        if grant is not None:
            self._book(grant, -1)
        return grant

    def failed(self, trainer: TrainerLine, failed: Failed) -> None:
        """A trainer gave a microbatch of its own up."""
        if failed.lease not in trainer.leases:
            return
        trainer.leases.remove(failed.lease)
        for grant in self.grants:
            if grant.lease == failed.lease:
                log.info("microbatch %d failed at %s: code %d", grant.number, failed.peer, failed.code)
                self._call_back(grant)

    def _call_back(self, grant: Grant) -> None:
        """Have the stages of the route forget a lease, and hear what they had counted by then."""
        self._book(grant, -1)
        members = [self._members[peer] for peer, _ in grant.route if peer in self._members]
        self.grants.call_back(grant.lease, {member.peer for member in members})
        for member in members:
            member.releases.append(grant.lease)
            member.send(Release((grant.lease,)))

    def released(self, member: Member) -> None:
        """A stage forgot the first lease that it was told to; leases of before a muster are nobody's any more."""
        if not member.releases:
            raise ProtocolError("a stage answers a RELEASE that was not sent", peer=member.peer)
        self.grants.released(member.releases.popleft(), member.peer)

    def lose(self, peer: PeerId) -> None:
        """A stage is gone: nothing is expected of it, and what was on its way through it must take another."""
        self.grants.lose(peer)
        for grant in self.grants:
            if any(hop == peer for hop, _ in grant.route):
                self._call_back(grant)

    def lose_trainer(self, trainer: TrainerLine) -> None:
        """A trainer is gone, with the microbatches that it had."""
        for grant in self.grants:
            if grant.lease in trainer.leases:
                self._call_back(grant)

    def clear(self) -> None:
        """All leases are void; the members' bookings with them."""
        self.grants.clear()
        for trainer in self._audience:
            trainer.leases.clear()
        for member in self._members.values():
            member.worker.booked_units = member.worker.in_flight = 0
