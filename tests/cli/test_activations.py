"""Options of what activations travel as: what is given counts, and what goes with nothing is refused in a sentence."""

from __future__ import annotations

import pytest

from swarmnode.errors import UsageError
from swarmnode.swarm.records.run import Compression
from swarmnode.terminal.option import build
from swarmnode.terminal.training_options import CompressionOptions


def parse_compression(rule: str, ratio: float, *, feedback: bool) -> Compression:
    typed = {"compress": rule, "topk_ratio": ratio, "topk_feedback": feedback}
    return build(CompressionOptions, typed).compression()


def test_what_is_given_counts() -> None:
    assert parse_compression("auto", 0.0, feedback=False) == Compression()
    assert parse_compression("adatopk", 0.0, feedback=False) == Compression("adatopk", 100.0)
    assert parse_compression("slowest", 20.0, feedback=True) == Compression("slowest", 20.0, feedback=True)


@pytest.mark.parametrize(
    ("rule", "ratio", "feedback", "says"),
    [
        ("zip", 0.0, False, "--compress zip: choose one of auto, none,"),
        ("", 0.0, False, "--compress : choose one of"),
        ("int8", 20.0, False, "need --compress topk, adatopk, slowest"),
        ("auto", 0.0, True, "need --compress topk, adatopk, slowest"),
        ("topk", 0.5, False, "--topk-ratio 0.5: give a number from 1 to 1000000"),
        ("topk", -3.0, False, "--topk-ratio -3"),
        ("adatopk", float("nan"), False, "--topk-ratio nan"),
        ("adatopk", float("inf"), False, "--topk-ratio inf"),
    ],
)
def test_what_cannot_be_is_one_sentence(rule: str, ratio: float, feedback: bool, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_compression(rule, ratio, feedback=feedback)
