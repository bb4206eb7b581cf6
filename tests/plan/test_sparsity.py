"""How much top-k keeps by the links of the swarm, and whose word makes a link the slowest."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.codec.tensors import Codec
from swarmnode.plan.compression import ADATOPK, SLOWEST, SPARSE_RULES, TOPK, is_allowed, slowest_link_s, topk_ratio

SECONDS = st.floats(0, 1e9)
RATIOS = st.floats(1, 1e6)


def test_adatopk_is_proportional_to_slowness() -> None:
    assert topk_ratio(ADATOPK, 2.0, 2.0, 100.0) == 100
    assert topk_ratio(ADATOPK, 1.0, 2.0, 100.0) == 50
    assert topk_ratio(ADATOPK, 0.001, 2.0, 100.0) == 1
    assert topk_ratio(ADATOPK, 3.0, 2.0, 100.0) == 100, "slower than all that was told of"


def test_for_comparison() -> None:
    assert topk_ratio(TOPK, 0.0, 2.0, 8.0) == 8
    assert [topk_ratio(SLOWEST, link_s, 2.0, 8.0) for link_s in (1.0, 1.7, 1.9, 2.5)] == [1, 1, 8, 8]


@pytest.mark.parametrize("rule", [ADATOPK, SLOWEST])
def test_nothing_is_left_out_where_no_link_is_known(rule: str) -> None:
    assert topk_ratio(rule, 0.0, 0.0, 100.0) == 1


@given(st.sampled_from(SPARSE_RULES), SECONDS, SECONDS, SECONDS, RATIOS)
def test_a_slower_link_never_sends_more(
    rule: str, one_s: float, other_s: float, slowest_s: float, ratio: float
) -> None:
    fast, slow = (topk_ratio(rule, link_s, slowest_s, ratio) for link_s in sorted((one_s, other_s)))
    assert 1 <= fast <= slow <= ratio


def test_a_link_is_the_slowest_by_the_word_of_both_its_ends() -> None:
    assert slowest_link_s([0.1, 4.0, 4.1, 0.2]) == 4.0
    assert slowest_link_s([0.1, 1e9, 0.2, 0.2]) == 0.2, "one peer's word is not enough"
    assert slowest_link_s([0.1, 0.0]) == 0.0, "known to one alone"
    assert slowest_link_s([]) == 0.0


@given(st.lists(SECONDS, min_size=2), st.floats(0, 1e9))
def test_one_liar_moves_nothing_past_what_others_tell(told: list[float], lie: float) -> None:
    assert slowest_link_s([*told, lie]) <= max(told)
    assert slowest_link_s([*told, lie]) >= slowest_link_s(told)
    assert math.isfinite(slowest_link_s([*told, lie]))


def test_what_a_swarm_allows() -> None:
    assert is_allowed("auto", ())
    assert is_allowed("none", ())
    assert is_allowed(ADATOPK, {Codec.TOPK})
    assert not is_allowed(ADATOPK, {Codec.INT8})
    assert not is_allowed("int4", {Codec.INT8})
