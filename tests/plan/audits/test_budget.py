"""Audits take their share of the throughput and no more, most of it with newcomers."""

from __future__ import annotations

import random

import pytest

from swarmnode.plan.audits import AuditBudget, cost_of

DECODE_S, PREFILL_S = 1.0, 1 / 16  # a pass of 64 positions costs four decode steps


@pytest.mark.parametrize("trust", [0.0, 0.5, 1.0])
def test_the_share_is_kept(trust: float) -> None:
    budget, dice = AuditBudget(0.03), random.Random(1)
    cost = cost_of(32, 128, decode_s=DECODE_S, prefill_s=PREFILL_S)
    for _ in range(5_000):
        if dice.random() < budget.chance(cost, trust):
            budget.spend(cost)
    assert 0.014 < budget.spent_share < 0.0305


def test_newcomers_are_audited_most() -> None:
    cost = cost_of(32, 128, decode_s=DECODE_S, prefill_s=PREFILL_S)
    newcomer, known, old = (AuditBudget().chance(cost, trust) for trust in (0.0, 0.5, 1.0))
    assert newcomer == pytest.approx(0.03 * 2 * 130 / 10)
    assert newcomer > known > old > 0


def test_no_share_no_audit() -> None:
    assert AuditBudget(0.0).chance(cost_of(9, 9, decode_s=1.0, prefill_s=0.1), 0.0) == 0.0
