"""Each session's proposers: a look-up, forced tokens with a grammar; and the budget knows the route's costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from swarmnode.codec.body import HopSpec
from swarmnode.codec.sampling import Grammar, GrammarKind, Sampling
from swarmnode.plan.serving.draft_budget import MeasuredBudget, RowCost
from swarmnode.serving.drafting.choice import DrafterChoice
from swarmnode.serving.drafting.proposers import Proposers

ROUTE = (HopSpec("a", 0, 4), HopSpec("b", 4, 8))


def opened(grammar: Grammar | None = None) -> Any:
    sampling = Sampling(prompt_length=1, max_new_tokens=4, grammar=grammar)
    return SimpleNamespace(route=ROUTE, drafts=16, proposer="lookup", sampling=sampling)


def announced(**speeds: tuple[float, float, int]) -> Any:
    names = ("decode_units_per_s", "prefill_units_per_s", "sessions")
    return {peer: SimpleNamespace(**dict(zip(names, values, strict=True))) for peer, values in speeds.items()}


def node(sessions: int, row_load: float = 0.0) -> Any:
    return lambda: SimpleNamespace(load=sessions, row_load=row_load)


def test_a_session_looks_up_and_a_grammar_forces() -> None:
    proposers = Proposers(dict, node(1))
    plain, _ = proposers(opened())
    forced, budget = proposers(opened(Grammar(GrammarKind.REGEX, "a+")))
    assert isinstance(plain, DrafterChoice) and isinstance(forced, DrafterChoice)
    assert [one.name for one in plain._drafters] == ["lookup"]
    assert [one.name for one in forced._drafters] == ["forced", "lookup"]
    assert isinstance(budget, MeasuredBudget)
    assert budget.worth("forced") >= budget.worth("lookup")


def test_the_budget_knows_the_busiest_hop() -> None:
    peers = announced(a=(1000.0, 8000.0, 9), b=(100.0, 400.0, 3))
    cost = Proposers(lambda: peers, node(2, 0.3))._cost(ROUTE)
    assert cost == RowCost(0.04 - 0.01, 0.01, 2, 0.3)
    assert Proposers(lambda: peers, node(500))._cost(ROUTE) == RowCost(0.004 - 0.0005, 0.0005, 499), (
        "its own load is live"
    )


def test_hops_without_speeds_cost_nothing() -> None:
    assert Proposers(dict, node(1))._cost(ROUTE) == RowCost(0.0, 0.0)
