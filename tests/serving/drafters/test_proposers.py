"""Each session's proposers, and a budget that knows the costs of the route."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swarmnode.codec.body import HopSpec
from swarmnode.plan.serving.draft_budget import MeasuredBudget, RowCost
from swarmnode.serving.drafting.proposers import DrafterChoice, Proposers

ROUTE = (HopSpec("a", 0, 4), HopSpec("b", 4, 8))


def opened() -> Any:
    return SimpleNamespace(route=ROUTE, drafts=16, proposer="lookup")


def announced(**speeds: tuple[float, float, int]) -> Any:
    names = ("decode_units_per_s", "prefill_units_per_s", "sessions")
    return {
        peer: SimpleNamespace(pair_units_per_s=0.0, **dict(zip(names, values, strict=True)))
        for peer, values in speeds.items()
    }


def node(sessions: int, row_load: float = 0.0) -> Any:
    return lambda: SimpleNamespace(load=sessions, row_load=row_load)


def test_a_session_looks_up() -> None:
    drafter, budget = Proposers(dict, node(1))(opened())
    assert isinstance(drafter, DrafterChoice)
    assert [one.name for one in drafter._drafters] == ["lookup"]
    assert isinstance(budget, MeasuredBudget)


def test_the_budget_knows_the_busiest_hop() -> None:
    peers = announced(a=(1000.0, 8000.0, 9), b=(100.0, 400.0, 3))
    cost = Proposers(lambda: peers, node(2, 0.3))._cost(ROUTE)
    assert cost == pytest.approx((0.03, 0.01, 2, 1.0, 1.1, 0.0)), "0.3 here are more there, with slower rows"
    cost = Proposers(lambda: peers, node(500, 0.3))._cost(ROUTE)
    assert cost == pytest.approx((0.0035, 0.0005, 499, 0.3, 11.0, 0.0)), "its own load is live"


def test_hops_without_speeds_cost_nothing() -> None:
    assert Proposers(dict, node(1))._cost(ROUTE) == RowCost(0.0, 0.0)
