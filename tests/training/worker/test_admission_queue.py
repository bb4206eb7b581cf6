"""Admission queue: what a stage takes, refuses, gives up and begins a step later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmnode.training.worker import microbatch_in_flight as module
from swarmnode.training.worker.microbatch_in_flight import AdmissionQueue, Arrival
from tests.compute.training.toy import ToySegment
from tests.peer.training_swarm import one_part


class Passage:
    """One that only knows where it is and whether it was ended."""

    def __init__(self, arrival: Arrival) -> None:
        self.body = arrival.body
        self.held_bytes = len(arrival.payload)
        self.is_ended = False

    def end(self) -> None:
        self.is_ended = True


class Line:
    def __init__(self) -> None:
        self.open = True

    def close(self) -> None:
        self.open = False


def arrival(lease: int, hop: int = 0, size_bytes: int = 10) -> Arrival:
    return Arrival(
        cast("Any", Line()),
        cast("Any", SimpleNamespace(lease=lease, hop=hop, number=lease, run=b"", step=0)),
        bytes(size_bytes),
    )


def begun(admission_queue: AdmissionQueue, came: Arrival) -> Any:
    microbatch: Any = Passage(came)
    admission_queue.begin(microbatch)
    return microbatch


def test_the_same_lease_is_taken_once_per_hop() -> None:
    admission_queue = AdmissionQueue(one_part(ToySegment(0, 2), cast("Any", None)))
    microbatch = begun(admission_queue, arrival(1))
    admission_queue.wait(arrival(4))
    assert not admission_queue.reserve(arrival(1)) and not admission_queue.reserve(arrival(4))
    assert admission_queue.reserve(arrival(1, hop=1)) and admission_queue.reserve(arrival(2))
    admission_queue.ended(microbatch)
    admission_queue.ended(microbatch)
    assert not admission_queue.reserve(arrival(1))
    admission_queue.next_step(1)
    assert admission_queue.reserve(arrival(1)), "a lease says of which step it is"


def test_senders_are_not_trusted_to_keep_within_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IN_FLIGHT", 3)
    monkeypatch.setattr(module, "MAX_HELD_BYTES", 100)
    admission_queue = AdmissionQueue(one_part(ToySegment(0, 2), cast("Any", None)))
    begun(admission_queue, arrival(1, size_bytes=40))
    admission_queue.wait(arrival(2, size_bytes=40))
    assert admission_queue.reserve(arrival(3, size_bytes=20)) and not admission_queue.reserve(arrival(3, size_bytes=21))
    begun(admission_queue, arrival(3, size_bytes=0))
    assert not admission_queue.reserve(arrival(4, size_bytes=0)), "three are there"


def test_a_lease_that_is_called_back_ends_and_is_late_until_the_step_is_over() -> None:
    admission_queue = AdmissionQueue(one_part(ToySegment(0, 2), cast("Any", None)))
    one, other = begun(admission_queue, arrival(1)), begun(admission_queue, arrival(2))
    admission_queue.release((1, 7))
    assert one.is_ended and not other.is_ended
    assert admission_queue.is_released(7) and not admission_queue.is_released(2)
    admission_queue.next_step(1)
    assert not admission_queue.is_released(7)


def test_those_of_the_next_step_wait_for_it_once() -> None:
    admission_queue = AdmissionQueue(one_part(ToySegment(0, 2), cast("Any", None)))
    waiting = [arrival(1), arrival(2)]
    for came in waiting:
        admission_queue.wait(came)
    assert admission_queue.next_step(1) == waiting and admission_queue.next_step(1) == []


def test_a_new_term_ends_everything() -> None:
    admission_queue = AdmissionQueue(one_part(ToySegment(0, 2), cast("Any", None)))
    microbatch, waiting = begun(admission_queue, arrival(1)), arrival(2)
    admission_queue.wait(waiting)
    admission_queue.release((9,))
    admission_queue.new_term()
    assert microbatch.is_ended and not cast("Any", waiting.channel).open
    assert not admission_queue.is_released(9) and admission_queue.next_step(1) == []
