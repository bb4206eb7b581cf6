import numpy as np
import pytest
from scipy.optimize import linprog

from swarmnode.plan.spans.flow import bound, fair_levels, supply_of, throughput, worth


def random_spans(chance, units, peers):
    spans = []
    for _ in range(peers):
        start = int(chance.integers(units))
        spans.append((start, int(chance.integers(start + 1, units + 1)), float(chance.uniform(1, 10))))
    return spans


def throughput_by_linear_programme(units, spans):
    """The definition: how much of its time each peer spends on each unit that it holds, so that the least unit has most."""
    variables = [(peer, unit) for peer, (start, end, _) in enumerate(spans) for unit in range(start, end)]
    done = np.zeros((units, len(variables) + 1))
    spent = np.zeros((len(spans), len(variables) + 1))
    for column, (peer, unit) in enumerate(variables):
        done[unit, column] = -1
        spent[peer, column] = 1
    done[:, -1] = 1
    limits = np.concatenate([np.zeros(units), [speed for *_, speed in spans]])
    return -linprog([0] * len(variables) + [-1], A_ub=np.vstack([done, spent]), b_ub=limits).fun


@pytest.mark.parametrize("seed", range(25))
def test_throughput_is_that_of_the_linear_programme(seed):
    chance = np.random.default_rng(seed)
    units = int(chance.integers(1, 14))
    spans = random_spans(chance, units, int(chance.integers(1, 12)))
    assert throughput(supply_of(units, spans)) == pytest.approx(throughput_by_linear_programme(units, spans), abs=1e-7)


@pytest.mark.parametrize("seed", range(10))
def test_fair_levels_share_out_all_work_and_begin_with_the_throughput(seed):
    chance = np.random.default_rng(seed)
    spans = random_spans(chance, 10, 8)
    supply = supply_of(10, spans)
    levels = fair_levels(supply[None])[0]
    assert levels.sum() == pytest.approx(sum(speed for *_, speed in spans))
    assert levels.min() == pytest.approx(throughput(supply))
    rough = fair_levels(supply[None], rounds=2)[0]
    assert rough.min() == pytest.approx(levels.min())
    assert (rough <= levels + 1e-9).all()


def test_a_batch_is_the_same_as_one_by_one():
    chance = np.random.default_rng(1)
    batch = np.stack([supply_of(12, random_spans(chance, 12, 9)) for _ in range(7)])
    together = fair_levels(batch)
    for one, levels in zip(batch, together, strict=True):
        assert fair_levels(one[None])[0] == pytest.approx(levels)


def test_a_unit_without_holder_stops_everything():
    assert throughput(supply_of(3, [(0, 1, 5.0), (2, 3, 5.0)])) == 0


def test_worth_sees_that_one_of_two_bottlenecks_is_gone():
    two, one = worth(np.array([[1.0, 1.0, 5.0], [1.0, 5.0, 5.0]]))
    assert two < one
    assert worth(np.array([[2.0, 2.0, 2.0]]))[0] == pytest.approx(2.0)


def test_no_placement_passes_the_bound():
    chance = np.random.default_rng(2)
    for _ in range(200):
        units, peers = int(chance.integers(1, 10)), int(chance.integers(1, 9))
        able = [(int(chance.integers(1, units + 1)), float(chance.uniform(1, 10))) for _ in range(peers)]
        starts = [int(chance.integers(units - capacity + 1)) for capacity, _ in able]
        placed = [(start, start + c, v) for start, (c, v) in zip(starts, able, strict=True)]
        assert throughput(supply_of(units, placed)) <= bound(units, able) * (1 + 1e-9)


def test_bound_by_hand():
    assert bound(4, [(4, 8.0)]) == 2.0
    assert bound(4, [(2, 100.0), (2, 1.0)]) == 0.5, "the slow one alone holds two units"
    assert bound(4, [(1, 5.0), (2, 5.0)]) == 0.0, "no room for all"
