"""How many microbatches stages are given at once."""

from __future__ import annotations

import math

import pytest

from swarmnode.plan.training.wiring import BELIEVED, QUEUES, Replica, set_at_once
from swarmnode.plan.view import Span
from tests.plan.training.lines import links


def at_once(workers: dict[str, Replica], **network: float) -> dict[str, int]:
    set_at_once(4, workers, links("".join(workers), **network))
    return {peer: worker.at_once for peer, worker in workers.items()}


def halves(front_s: float, back_s: float) -> dict[str, Replica]:
    return {"a": Replica(Span(0, 2), front_s / 2), "b": Replica(Span(2, 4), back_s / 2)}


def test_a_stage_has_what_it_does_while_one_is_on_its_way() -> None:
    assert at_once(halves(1.0, 1.0)) == {"a": 1 + 3, "b": 1 + 3}, (
        "two ahead, and half as many where they wait for one another"
    )
    assert at_once(halves(1.0, 1.0), delay_s=4.0) == {"a": 1 + 15, "b": 1 + 15}, "it takes ten seconds"
    assert at_once(halves(1.0, 3.0)) == {"a": 1 + 6, "b": 1 + 2}


def test_a_slow_line_does_not_fill_with_what_waits_for_it() -> None:
    """2 s each way: 4.2 s there and back, of which one leaves a line every 2 s."""
    assert at_once(halves(0.1, 0.1), sending_s=2.0) == {"a": 1 + 4, "b": 1 + 4}


def test_who_says_that_it_is_fast_is_given_little_more() -> None:
    workers = {peer: Replica(Span(0, 4), 0.25) for peer in "abc"} | {"z": Replica(Span(0, 4), 1e-12)}
    given = at_once(workers)
    assert given["z"] <= 1 + math.ceil(BELIEVED * QUEUES)


@pytest.mark.parametrize("unit_s", [1e-300, 1e300])
def test_whatever_a_stage_says_it_is_a_number(unit_s: float) -> None:
    assert all(
        count >= 1 for count in at_once({"a": Replica(Span(0, 2), unit_s), "b": Replica(Span(2, 4), 0.1)}).values()
    )


def test_where_units_have_nobody_nothing_changes() -> None:
    assert at_once({"a": Replica(Span(0, 2), 0.1)}) == {"a": 0}
