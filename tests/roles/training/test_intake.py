"""Intake: what a stage takes, refuses, gives up and begins a step later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmnode.ledger import MemoryLedger
from swarmnode.roles.training import intake as module
from swarmnode.roles.training.intake import Arrival, Intake
from swarmnode.roles.training.memory import TrainingMemory
from tests.compute.training.toy import ToySegment


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
    return Arrival(cast("Any", Line()), cast("Any", SimpleNamespace(lease=lease, hop=hop)), bytes(size_bytes))


def begun(intake: Intake, came: Arrival) -> Any:
    passage: Any = Passage(came)
    intake.begin(passage)
    return passage


def test_the_same_lease_is_taken_once_per_hop() -> None:
    intake = Intake(TrainingMemory(MemoryLedger(), ToySegment(0, 2)))
    passage = begun(intake, arrival(1))
    assert not intake.takes(arrival(1)) and intake.takes(arrival(1, hop=1)) and intake.takes(arrival(2))
    intake.ended(passage)
    assert intake.takes(arrival(1))


def test_an_earlier_passage_of_the_same_lease_does_not_end_the_later_one() -> None:
    intake = Intake(TrainingMemory(MemoryLedger(), ToySegment(0, 2)))
    earlier, later = begun(intake, arrival(1)), begun(intake, arrival(1))
    intake.ended(earlier)
    assert not intake.takes(arrival(1))
    intake.ended(later)
    assert intake.takes(arrival(1))


def test_senders_are_not_trusted_to_keep_within_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PASSAGES", 3)
    monkeypatch.setattr(module, "MAX_HELD_BYTES", 100)
    intake = Intake(TrainingMemory(MemoryLedger(), ToySegment(0, 2)))
    begun(intake, arrival(1, size_bytes=40))
    intake.wait(arrival(2, size_bytes=40))
    assert intake.takes(arrival(3, size_bytes=20)) and not intake.takes(arrival(3, size_bytes=21))
    begun(intake, arrival(3, size_bytes=0))
    assert not intake.takes(arrival(4, size_bytes=0)), "three are there"


def test_a_lease_that_is_called_back_ends_and_is_late_until_the_step_is_over() -> None:
    intake = Intake(TrainingMemory(MemoryLedger(), ToySegment(0, 2)))
    one, other = begun(intake, arrival(1)), begun(intake, arrival(2))
    intake.release((1, 7))
    assert one.is_ended and not other.is_ended
    assert intake.is_released(7) and not intake.is_released(2)
    intake.next_step()
    assert not intake.is_released(7)


def test_those_of_the_next_step_wait_for_it_once() -> None:
    intake = Intake(TrainingMemory(MemoryLedger(), ToySegment(0, 2)))
    waiting = [arrival(1), arrival(2)]
    for came in waiting:
        intake.wait(came)
    assert intake.next_step() == waiting and intake.next_step() == []


def test_a_new_term_ends_everything() -> None:
    intake = Intake(TrainingMemory(MemoryLedger(), ToySegment(0, 2)))
    passage, waiting = begun(intake, arrival(1)), arrival(2)
    intake.wait(waiting)
    intake.release((9,))
    intake.new_term()
    assert passage.is_ended and not cast("Any", waiting.channel).open
    assert not intake.is_released(9) and intake.next_step() == []
