"""Admission queue: the microbatches and labels that a stage has admitted, of the current step and of the next one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from swarmnode.codec.training_messages import Forward
from swarmnode.links.switchboard import Channel
from swarmnode.training.worker.admission import LabelQueue
from swarmnode.training.worker.memory import MAX_IN_FLIGHT
from swarmnode.training.worker.microbatch_in_flight import MicrobatchInFlight, place_of
from swarmnode.training.worker.training_parts import TrainingParts

MAX_HELD_BYTES = 1 << 30  # of the payloads that they brought


class Arrival(NamedTuple):
    """Arrived FORWARD message of a microbatch: its channel, body and payload."""

    channel: Channel
    body: Forward
    payload: bytes | bytearray


class AdmissionQueue:
    """The admitted microbatches of a stage: those of the current step are in flight, those of the next one wait for its COMMIT."""

    def __init__(self, parts: TrainingParts) -> None:
        self.labels = LabelQueue(parts.ledger)
        self._parts = parts
        self._microbatches: dict[int, MicrobatchInFlight] = {}  # by `place_of`
        self._waiting: list[Arrival] = []
        self._released: set[int] = set()  # leases of this step whose FORWARD may still arrive
        self._used_places: set[int] = set()  # places that were taken in this step: each may be used once

    def is_released(self, lease: int) -> bool:
        """Return whether the coordinator has called back this lease in the current step."""
        return lease in self._released

    def reserve(self, arrival: Arrival) -> bool:
        """Return whether a microbatch is new and has room, and reserve its memory. A lease is computed once, and senders are not
        trusted to keep within the limits."""
        held_bytes = sum(microbatch.held_bytes for microbatch in self._microbatches.values())
        held_bytes += sum(len(other.payload) for other in self._waiting) + len(arrival.payload)
        has_room = len(self._microbatches) + len(self._waiting) < MAX_IN_FLIGHT and held_bytes <= MAX_HELD_BYTES
        place = place_of(arrival.body)
        return has_room and place not in self._used_places and self._parts.admit(arrival.body, place)

    def wait(self, arrival: Arrival) -> None:
        """Keep a microbatch of the next step until that step begins."""
        self._used_places.add(place_of(arrival.body))
        self._waiting.append(arrival)

    def begin(self, microbatch: MicrobatchInFlight) -> None:
        """Record a microbatch that this node has begun to compute."""
        self._used_places.add(place_of(microbatch.body))
        self._microbatches[place_of(microbatch.body)] = microbatch

    def ended(self, microbatch: MicrobatchInFlight) -> None:
        """Remove a microbatch that has ended, and free its memory and labels. Safe to call twice."""
        place = place_of(microbatch.body)
        if self._microbatches.pop(place, None) is not None:
            self._parts.ended(place)
            self.labels.drop([microbatch.body.lease])

    def release(self, leases: Iterable[int]) -> None:
        """End the microbatches of these leases, as the coordinator has called them back; those that arrive later are refused."""
        called = set(leases)
        self._released |= called
        self.labels.drop(called)
        for microbatch in [microbatch for microbatch in self._microbatches.values() if microbatch.body.lease in called]:
            microbatch.end()

    def give_up_all(self) -> None:
        """End all microbatches, those that wait included, and drop all labels."""
        for microbatch in list(self._microbatches.values()):
            microbatch.end()
        for arrival in self._waiting:
            arrival.channel.close()
            self._parts.ended(place_of(arrival.body))
        self._waiting.clear()
        self.labels.clear()

    def new_term(self) -> None:
        """Begin a new coordinator's term: microbatches of earlier leases are given up."""
        self._released.clear()
        self._used_places.clear()
        self.give_up_all()

    def next_step(self, step: int) -> list[Arrival]:
        """Begin `step`, and return the microbatches that had arrived too early and waited for it."""
        self._released.clear()
        self.labels.next_step(step)
        self._used_places.clear()
        waiting, self._waiting = self._waiting, []
        return waiting
