"""Tally: what stages and trainers tell of one step."""

from __future__ import annotations

from typing import Any, cast

import pytest

from swarmnode.codec.training_messages import Condition, Status
from swarmnode.errors import ProtocolError
from swarmnode.plan.ledger import Ledger
from swarmnode.plan.view import Span
from swarmnode.roles.training.grants import Grant
from swarmnode.roles.training.member import Member
from swarmnode.roles.training.status import counted_of
from swarmnode.roles.training.tally import Tally

FIRST, LAST = Span(0, 1), Span(1, 2)


def stage(peer: str, span: Span) -> Member:
    member = Member(peer, cast("Any", None))
    member.worker.span = span
    return member


def counted(span: Span, mask: int, *losses: float) -> Status:
    masks = counted_of(dict.fromkeys(range(*span), mask))
    return Status(1, Condition.READY, *span, b"", 0, masks, losses=losses)


@pytest.fixture
def tally() -> Tally:
    """Three microbatches, two units with a stage each."""
    tally = Tally(Ledger(0, 2, 3), 0.0)
    tally.enter([stage("first", FIRST), stage("last", LAST)])
    return tally


def test_what_a_trainer_has_back_counts_everywhere(tally: Tally) -> None:
    for number, loss in enumerate((1.0, 2.0, 6.0)):
        assert number in tally.ledger.missing()
        tally.count(Grant(number, number, (("first", FIRST), ("last", LAST))), loss)
    assert tally.ledger.complete() and tally.loss == pytest.approx(3.0)


def test_the_last_stage_tells_losses_of_what_it_has_counted(tally: Tally) -> None:
    tally.take(stage("last", LAST), counted(LAST, 0b101, 4.0, 8.0))
    assert tally.loss == pytest.approx(6.0)
    tally.take(stage("first", FIRST), counted(FIRST, 0b111))
    assert tally.loss == pytest.approx(6.0) and tally.ledger.missing() == [1]


def test_what_a_stage_says_replaces_what_was_known_or_adds_to_it(tally: Tally) -> None:
    tally.take(stage("first", FIRST), counted(FIRST, 0b001))
    tally.add(stage("first", FIRST), counted(FIRST, 0b010))
    assert tally.ledger.peers["first"].mask(0) == 0b011
    tally.take(stage("first", FIRST), counted(FIRST, 0b010))
    assert tally.ledger.peers["first"].mask(0) == 0b010


def test_a_microbatch_that_the_step_does_not_have(tally: Tally) -> None:
    with pytest.raises(ProtocolError):
        tally.take(stage("first", FIRST), counted(FIRST, 0b1000))
