"""What receipts add up to, and what is left of it where few clients signed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.plan.credit import HALF_CREDIT, MOST_WEIGHT, credit_of, weight_of
from swarmnode.swarm.records.receipt import MAX_UNIT_TOKENS, Receipt


def by(work: Mapping[str, int]) -> list[Receipt]:
    return [Receipt(bytes(32), client, "worker", 1, 2, served) for client, served in work.items()]


def test_nothing_is_nothing() -> None:
    credit = credit_of([])
    assert (credit.counted, credit.clients, credit.served, credit.trained) == (0, 0, 0, 0)


def test_replays_count_once_and_older_ones_of_a_batch_not() -> None:
    (first,) = by({"a": 100})
    later = msgspec.structs.replace(first, until=3, served=150)
    assert credit_of([later, first, first, later]).by_client == {"a": 150}


def test_a_trained_token_counts_thrice() -> None:
    (receipt,) = by({"a": 100})
    credit = credit_of([msgspec.structs.replace(receipt, trained=10)])
    assert credit.by_client == {"a": 130}
    assert (credit.served, credit.trained) == (100, 10)


@pytest.mark.parametrize(("clients", "counted"), [(1, 0), (2, 100), (10, 900), (100, 9900)])
def test_of_clients_that_were_served_alike_all_but_one_count(clients: int, counted: int) -> None:
    assert credit_of(by({f"client {number}": 100 for number in range(clients)})).counted == pytest.approx(counted)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20), st.integers(1, MAX_UNIT_TOKENS))
def test_one_more_client_adds_at_most_twice_what_the_others_gave(others: list[int], huge: int) -> None:
    honest = {f"client {number}": work for number, work in enumerate(others)}
    before, after = credit_of(by(honest)).counted, credit_of(by({**honest, "friend": huge})).counted
    assert after - before <= 2 * sum(others) * (1 + 1e-9)


def test_weight_grows_with_credit_up_to_a_bound() -> None:
    units = 12
    half = credit_of(by({"a": units * HALF_CREDIT, "b": units * HALF_CREDIT}))
    assert weight_of(credit_of([]), units) == 1.0
    assert weight_of(half, units) == pytest.approx((1 + MOST_WEIGHT) / 2)
    assert weight_of(credit_of(by({"a": MAX_UNIT_TOKENS, "b": MAX_UNIT_TOKENS})), units) <= MOST_WEIGHT
