"""Dispatcher: gives the microbatches that are missing to trainers, along the best routes, and calls them back."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping

from swarmnode.codec.messages import HopSpec
from swarmnode.codec.training_messages import Failed, Lease, Release
from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.step_ledger import StepLedger
from swarmnode.plan.training.wiring import wire
from swarmnode.roles.training.coordinator.leases import OutstandingLease, OutstandingLeases
from swarmnode.roles.training.coordinator.trainer_connections import TrainerConnections, TrainerLine
from swarmnode.roles.training.coordinator.worker_handle import WorkerHandle, WorkerState

log = logging.getLogger(__name__)

LEASE_BITS = 22  # leases of one term


class Dispatcher:
    """Leases of one term. `members` and `trainer_connections` are the coordinator's own, read whenever something is to
    be decided."""

    def __init__(
        self, term: int, units: int, members: Mapping[PeerId, WorkerHandle], trainer_connections: TrainerConnections
    ) -> None:
        self.outstanding_leases = OutstandingLeases()
        self.term = term
        self._units = units
        self._members = members
        self._trainer_connections = trainer_connections
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return f"<Dispatcher of term {self.term}, {self.outstanding_leases!r}>"

    def dispatch(self, ledger: StepLedger) -> None:
        """Lease every microbatch that is missing and free, as long as trainers and stages have room."""
        busy = self.outstanding_leases.numbers
        usable = (member for member in self._members.values() if member.state is WorkerState.USABLE)
        workers = {member.peer: member.worker for member in usable}
        depth = len(wire(self._units, workers, [None] * self._units, in_flight=1 << 30) or ())
        for number in ledger.missing():
            trainer = self._trainer_connections.free()
            if trainer is None:
                return
            if number in busy:
                continue
            route = wire(self._units, workers, ledger.counters(number), in_flight=depth + 1)
            if route is None:
                return
            outstanding = OutstandingLease((self.term << LEASE_BITS) + next(self._numbers), number, tuple(route))
            self._grant(trainer, outstanding, ledger.step)

    def _grant(self, trainer: TrainerLine, outstanding: OutstandingLease, step: int) -> None:
        self.outstanding_leases.add(outstanding)
        self._book(outstanding, 1)
        trainer.leases.add(outstanding.lease)
        hops = tuple(HopSpec(peer, span.start, span.end) for peer, span in outstanding.route)
        trainer.send(Lease(self.term, outstanding.lease, step, outstanding.number, hops))

    def _book(self, outstanding: OutstandingLease, sign: int) -> None:
        for peer, span in outstanding.route:
            member = self._members.get(peer)
            if member is not None:
                member.worker.booked_units += sign * span.units
                member.worker.in_flight += sign

    def done(self, trainer: TrainerLine, lease: int) -> OutstandingLease | None:
        """A microbatch is back; None where it was called back before (the stages have said what they counted), or was another
        trainer's."""
        if lease not in trainer.leases:
            return None
        trainer.leases.remove(lease)
        outstanding = self.outstanding_leases.done(lease)
        if outstanding is not None:
            self._book(outstanding, -1)
        return outstanding

    def failed(self, trainer: TrainerLine, failed: Failed) -> None:
        """A trainer gave a microbatch of its own up."""
        if failed.lease not in trainer.leases:
            return
        trainer.leases.remove(failed.lease)
        for outstanding in self.outstanding_leases:
            if outstanding.lease == failed.lease:
                log.info("microbatch %d failed at %s: code %d", outstanding.number, failed.peer, failed.code)
                self._call_back(outstanding)

    def _call_back(self, outstanding: OutstandingLease) -> None:
        """Have the stages of the route forget a lease, and hear what they had counted by then."""
        self._book(outstanding, -1)
        members = [self._members[peer] for peer, _ in outstanding.route if peer in self._members]
        self.outstanding_leases.call_back(outstanding.lease, {member.peer for member in members})
        for member in members:
            member.releases.append(outstanding.lease)
            member.send(Release((outstanding.lease,)))

    def released(self, member: WorkerHandle) -> None:
        """A stage forgot the first lease that it was told to; leases of before a recovery plan are nobody's any more."""
        if not member.releases:
            raise ProtocolError("a stage answers a RELEASE that was not sent", peer=member.peer)
        self.outstanding_leases.released(member.releases.popleft(), member.peer)

    def lose(self, peer: PeerId) -> None:
        """A stage is gone: nothing is expected of it, and what was on its way through it must take another."""
        self.outstanding_leases.lose(peer)
        for outstanding in self.outstanding_leases:
            if any(hop == peer for hop, _ in outstanding.route):
                self._call_back(outstanding)

    def lose_trainer(self, trainer: TrainerLine) -> None:
        """A trainer is gone, with the microbatches that it had."""
        for outstanding in self.outstanding_leases:
            if outstanding.lease in trainer.leases:
                self._call_back(outstanding)

    def clear(self) -> None:
        """All leases are void; the members' bookings with them."""
        self.outstanding_leases.clear()
        for trainer in self._trainer_connections:
            trainer.leases.clear()
        for member in self._members.values():
            member.worker.booked_units = member.worker.in_flight = 0
