"""Admission queue: the microbatches that a stage has taken in, of the step that it is at and of the one to come, and labels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from swarmnode.codec.training_messages import Forward
from swarmnode.net.links.switchboard import Channel
from swarmnode.training.worker.label_queue import LabelQueue
from swarmnode.training.worker.memory import MAX_IN_FLIGHT
from swarmnode.training.worker.microbatch_in_flight import MicrobatchInFlight, place_of
from swarmnode.training.worker.training_parts import TrainingParts

MAX_HELD_BYTES = 1 << 30  # of what they brought in


class Arrival(NamedTuple):
    """A FORWARD, and the conversation that brought it."""

    channel: Channel
    body: Forward
    payload: bytes | bytearray


class AdmissionQueue:
    """Those of this step are in flight; those of the next wait for the COMMIT that may still be on its way."""

    def __init__(self, parts: TrainingParts) -> None:
        self.labels = LabelQueue(parts.ledger)
        self._parts = parts
        self._microbatches: dict[int, MicrobatchInFlight] = {}  # by `place_of`
        self._waiting: list[Arrival] = []
        self._released: set[int] = set()  # leases of this step whose FORWARD may still be on its way
        self._taken: set[int] = set()  # places that were taken in this step: each is good once

    def __repr__(self) -> str:
        return f"<AdmissionQueue of {len(self._microbatches)} in flight, {len(self._waiting)} waiting>"

    def is_released(self, lease: int) -> bool:
        """Whether the coordinator has called a lease of this step back."""
        return lease in self._released

    def takes(self, arrival: Arrival) -> bool:
        """Whether it was not here before, since who holds a lease has it computed once, and there is room for it: senders are not
        trusted to keep within what fits."""
        held_bytes = sum(microbatch.held_bytes for microbatch in self._microbatches.values())
        held_bytes += sum(len(other.payload) for other in self._waiting) + len(arrival.payload)
        has_room = len(self._microbatches) + len(self._waiting) < MAX_IN_FLIGHT and held_bytes <= MAX_HELD_BYTES
        place = place_of(arrival.body)
        return has_room and place not in self._taken and self._parts.admit(arrival.body, place)

    def wait(self, arrival: Arrival) -> None:
        """It is of the step to come."""
        self._taken.add(place_of(arrival.body))
        self._waiting.append(arrival)

    def begin(self, microbatch: MicrobatchInFlight) -> None:
        """It is under way."""
        self._taken.add(place_of(microbatch.body))
        self._microbatches[place_of(microbatch.body)] = microbatch

    def ended(self, microbatch: MicrobatchInFlight) -> None:
        """It is over, in whatever way."""
        place = place_of(microbatch.body)
        if self._microbatches.pop(place, None) is not None:
            self._parts.ended(place)
            self.labels.drop([microbatch.body.lease])

    def release(self, leases: Iterable[int]) -> None:
        """The coordinator calls leases back: what is here of them ends, and what comes of them is late."""
        called = set(leases)
        self._released |= called
        self.labels.drop(called)
        for microbatch in [microbatch for microbatch in self._microbatches.values() if microbatch.body.lease in called]:
            microbatch.end()

    def give_up_all(self) -> None:
        """End everything that is here."""
        for microbatch in list(self._microbatches.values()):
            microbatch.end()
        for arrival in self._waiting:
            arrival.channel.close()
            self._parts.ended(place_of(arrival.body))
        self._waiting.clear()
        self.labels.clear()

    def new_term(self) -> None:
        """Another coordinator, or the same one anew: all leases of before are void."""
        self._released.clear()
        self._taken.clear()
        self.give_up_all()

    def next_step(self, step: int) -> list[Arrival]:
        """`step` has begun; those that have waited for that."""
        self._released.clear()
        self.labels.next_step(step)
        self._taken.clear()
        waiting, self._waiting = self._waiting, []
        return waiting
