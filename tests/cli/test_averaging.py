"""Options of averaging: what is given counts, and what goes with nothing is refused in a sentence."""

from __future__ import annotations

import pytest

from swarmnode.cli.options.averaging import fine_settings, parse_averaging
from swarmnode.errors import UsageError

UNSET = {"keep": 0.0, "outer_lr": -1.0, "outer_momentum": -1.0}


def test_only_what_is_given_is_set() -> None:
    assert fine_settings(1, "none", **UNSET) == {}
    assert fine_settings(1, "topk", **{**UNSET, "keep": 0.02}) == {"keep": 0.02}
    assert fine_settings(30, "int8", **{**UNSET, "outer_momentum": 0.0}) == {"outer_momentum": 0.0}


def test_topk2_is_sparseloco_but_for_what_is_given() -> None:
    averaging = parse_averaging(30, "topk2", 0)
    assert (averaging.keep, averaging.outer_momentum, averaging.outer_lr) == (0.02, 0.0, 1.0)
    assert parse_averaging(30, "topk2", 0, keep=0.01).keep == 0.01
    assert parse_averaging(30, "topk", 0).keep == 0.05


@pytest.mark.parametrize(
    ("every", "codec", "given", "says"),
    [
        (1, "int8", {"keep": 0.1}, "goes with --average-codec topk or topk2"),
        (1, "topk", {"keep": 1.5}, "--average-keep 1.5: it is a share above 0, up to 1"),
        (1, "topk", {"keep": -0.1}, "--average-keep -0.1"),
        (1, "topk", {"keep": float("nan")}, "--average-keep nan"),
        (1, "none", {"outer_lr": 0.7}, "go with --average-every above 1"),
        (8, "none", {"outer_lr": 0.0}, "--outer-lr 0: it is a number above 0"),
        (8, "none", {"outer_lr": float("inf")}, "--outer-lr inf"),
        (8, "none", {"outer_momentum": 1.0}, "--outer-momentum 1: it is a number from 0, below 1"),
    ],
)
def test_what_cannot_be_is_one_sentence(every: int, codec: str, given: dict[str, float], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        fine_settings(every, codec, **{**UNSET, **given})
