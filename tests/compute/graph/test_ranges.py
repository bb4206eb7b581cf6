"""Numbers out of range are found for every operator that looks things up, on any device, and change nothing otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnode.compute.graph.graph import resolve
from swarmnode.compute.graph.graph_segment import RangeCheck

X = torch.arange(12.0).view(4, 3)
ROWS, EXPERTS = torch.arange(16.0).view(4, 4), torch.ones(2, 4, 4)


SCORES = X.log_softmax(1)


def places(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def ends(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


CASES: dict[str, tuple[str, tuple[Any, ...], tuple[Any, ...]]] = {
    "embedding": ("aten.embedding.default", (X, places(0, 3)), (X, places(0, 4))),
    "bags": ("aten.embedding_bag.default", (X, places(0, 3, 1), places(0, 2)), (X, places(0, 3, 1), places(0, 4))),
    "bags backwards": (
        "aten.embedding_bag.default",
        (X, places(0, 3), places(0, 2, 2)),
        (X, places(0, 3), places(0, 2, 1)),
    ),
    "bags that begin late": ("aten.embedding_bag.default", (X, places(0, 3), places(0)), (X, places(0, 3), places(1))),
    "rows of bags": ("aten.embedding_bag.default", (X, places(0, 3), places(0)), (X, places(0, 4), places(0))),
    "repeats": (
        "aten.repeat_interleave.self_Tensor",
        (X, places(1, 0, 2, 3), 0),
        (X, places(1, 0, 2, -3), 0),
    ),
    "multinomial": ("aten.multinomial.default", (X + 1, 5, True), (X - 1, 5, True)),
    "nothing to draw from": ("aten.multinomial.default", (X[:1], 5, True), (0 * X, 5, True)),
    "index_select": ("aten.index_select.default", (X, 1, places(2)), (X, 1, places(3))),
    "gather": ("aten.gather.default", (X, 0, places(3, 0)[None]), (X, 0, places(-1, 0)[None])),
    "scatter_add": ("aten.scatter_add.default", (X, 0, places(3)[None], X), (X, 0, places(4)[None], X)),
    "index_fill": ("aten.index_fill.int_Scalar", (X, 0, places(-4), 1), (X, 0, places(-5), 1)),
    "index": ("aten.index.Tensor", (X, [None, places(-3)]), (X, [None, places(3)])),
    "index_put": ("aten.index_put.default", (X, [places(1)], X[:1]), (X, [places(7)], X[:1])),
    "mask": ("aten.index.Tensor", (X, [X > 3]), (X, [X[:, 0] > 3, places(5)])),
    "take": ("aten.take.default", (X, places(-12)), (X, places(12))),
    "take_along_dim": ("aten.take_along_dim.default", (X, places(11)), (X, places(-1))),
    "one_hot": ("aten.one_hot.default", (places(2), 3), (places(3), 3)),
    "cross_entropy": (
        "aten.cross_entropy_loss.default",
        (X, places(0, 1, 2, -100)),
        (X, places(0, 1, 2, 3)),
    ),
    "nll": ("aten.nll_loss_nd.default", (X, places(0, 1, 2, 2)), (X, places(0, 1, 2, -1))),
    "binary": ("aten.binary_cross_entropy.default", (X / 11, X / 11), (X, X / 11)),
    "bernoulli": ("aten.bernoulli.default", (X / 11,), (X * float("nan"),)),
    "masked_scatter": ("aten.masked_scatter.default", (X, X > 9, X[0]), (X, X > 2, X[0])),
    "ctc": (
        "aten.ctc_loss.Tensor",
        (SCORES, places(1, 2), places(4), places(2)),
        (SCORES, places(1, 3), places(4), places(2)),
    ),
    "ctc with padding": (
        "aten.ctc_loss.Tensor",
        (SCORES[:, None], places(1, -1)[None], places(4), places(1)),
        (SCORES[:, None], places(1, -1)[None], places(4), places(2)),
    ),
    "ctc, too long": (
        "aten.ctc_loss.Tensor",
        (SCORES, places(1, 2), places(4), places(2)),
        (SCORES, places(1, 2), places(5), places(2)),
    ),
    "groups": ("aten._grouped_mm.default", (ROWS, EXPERTS, ends(1, 4)), (ROWS, EXPERTS, ends(1, 5))),
    "groups backwards": ("aten._grouped_mm.default", (ROWS, EXPERTS, ends(1, 4)), (ROWS, EXPERTS, ends(3, 2))),
    "assumption": ("aten._assert_async.default", (X[0, 0] == 0,), (X[0, 0] == 1,)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_out_of_range_is_told_afterwards(name: str) -> None:
    operator, good, bad = CASES[name]
    check, function = RangeCheck(), resolve(operator)
    guarded = check.guarded(operator, function)
    torch.manual_seed(0)
    wanted = function(*good)
    torch.manual_seed(0)
    torch.testing.assert_close(guarded(*good), wanted)
    assert check.all_well()
    guarded(*bad)
    assert not check.all_well()
    check.begin()
    assert check.all_well()


@pytest.mark.parametrize("repeats", [(1, 0, 2, 4), (9, 0, -2, -1), (3,)])
def test_repeats_make_up_the_size_that_was_said(repeats: tuple[int, ...]) -> None:
    """On a card nobody looks at their sum before rows are written."""
    check = RangeCheck()
    function = check.guarded("aten.repeat_interleave.self_Tensor", resolve("aten.repeat_interleave.self_Tensor"))
    assert function(X, places(1, 0, 2, 3), 0, output_size=6).shape == (6, 3) and check.all_well()
    assert function(X, places(2), 0, output_size=8).shape == (8, 3) and check.all_well()
    assert function(X, places(*repeats), 0, output_size=6 if len(repeats) > 1 else 8).shape[1] == 3
    assert not check.all_well()


def test_operators_without_tables_are_left_alone() -> None:
    function = resolve("aten.add.Tensor")
    assert RangeCheck().guarded("aten.add.Tensor", function) is function


def test_probabilities_of_classes_are_no_classes() -> None:
    check = RangeCheck()
    loss = check.guarded("aten.cross_entropy_loss.default", resolve("aten.cross_entropy_loss.default"))
    assert bool(loss(X, X.softmax(1)).isfinite()) and check.all_well()
