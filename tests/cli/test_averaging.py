"""Options of averaging: what is given counts, and what goes with nothing is refused in a sentence."""

from __future__ import annotations

import pytest

from swarmnode.errors import UsageError
from swarmnode.swarm.records.run import Averaging
from swarmnode.terminal.option import build
from swarmnode.terminal.training_options import AveragingOptions


def averaging(every: int = 1, codec: str = "none", **typed: float) -> Averaging:
    """What these texts mean, as a command reads them."""
    return build(AveragingOptions, {"average_every": every, "average_codec": codec, **typed}).averaging()


def test_only_what_is_given_is_set() -> None:
    usual = Averaging()
    assert averaging(average_keep=0.0, outer_lr=-1.0, outer_momentum=-1.0) == usual
    assert averaging(1, "topk", average_keep=0.02).keep == 0.02
    assert averaging(30, "int8", outer_momentum=0.0).outer_momentum == 0.0
    assert averaging(30, "int8", outer_momentum=0.0).outer_lr == usual.outer_lr


def test_topk2_is_sparseloco_but_for_what_is_given() -> None:
    found = averaging(30, "topk2")
    assert (found.keep, found.outer_momentum, found.outer_lr) == (0.02, 0.0, 1.0)
    assert averaging(30, "topk2", average_keep=0.01).keep == 0.01
    assert averaging(30, "topk").keep == 0.05


@pytest.mark.parametrize(
    ("every", "codec", "given", "says"),
    [
        (1, "int8", {"average_keep": 0.1}, "needs --average-codec topk or topk2"),
        (1, "topk", {"average_keep": 1.5}, "--average-keep 1.5: give a share above 0, up to 1"),
        (1, "topk", {"average_keep": -0.1}, "--average-keep -0.1"),
        (1, "topk", {"average_keep": float("nan")}, "--average-keep nan"),
        (1, "none", {"outer_lr": 0.7}, "need --average-every above 1"),
        (8, "none", {"outer_lr": 0.0}, "--outer-lr 0: give a number above 0"),
        (8, "none", {"outer_lr": float("inf")}, "--outer-lr inf"),
        (8, "none", {"outer_momentum": 1.0}, "--outer-momentum 1: give a number from 0, below 1"),
    ],
)
def test_what_cannot_be_is_one_sentence(every: int, codec: str, given: dict[str, float], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        averaging(every, codec, **given)
