"""What each contributor's values travel as, by its line."""

from __future__ import annotations

import math

import pytest

from swarmnode.codec.tensors import Codec
from swarmnode.errors import UsageError
from swarmnode.plan.compression import LADDER
from swarmnode.plan.training.averaging import FEWEST, MOST, codecs_by_line, line_forms, part_shares
from swarmnode.swarm.records.run import Averaging, Run, check_run

BY_LINE = Averaging(by_line=True)


def codecs(lines_bps: list[float], averaging: Averaging = BY_LINE, allowed: tuple[int, ...] = LADDER) -> list[Codec]:
    return [Codec(form.codec) for form in line_forms(lines_bps, part_shares(lines_bps), averaging, allowed)]


def kept(lines_bps: list[float], codec: Codec = Codec.TOPK, keep: float = 0.05) -> list[float]:
    averaging = Averaging(codec=codec, keep=keep, by_line=True)
    return [form.keep for form in line_forms(lines_bps, [16] * len(lines_bps), averaging, LADDER)]


def test_a_slow_line_gets_the_mildest_codec_that_keeps_up() -> None:
    lines = [100e6, 100e6, 100e6, 40e6, 20e6, 10e6]
    assert codecs(lines) == [Codec.NONE, Codec.NONE, Codec.NONE, Codec.BF16, Codec.INT8, Codec.INT4]
    assert codecs([100e6, 100e6, 100e6, 70e6, 30e6])[3] == Codec.NONE, "who has a slower line adds up less, too"
    assert codecs([100e6, 20e6]) == [Codec.NONE, Codec.INT4], "of two, by the faster one"


def test_no_codec_is_milder_than_the_runs_or_other_than_the_swarm_allows() -> None:
    assert codecs([100e6, 100e6, 40e6], Averaging(codec=Codec.INT8, by_line=True)) == [
        Codec.INT8,
        Codec.INT8,
        Codec.INT4,
    ]
    assert codecs([100e6, 100e6, 1e6], allowed=(Codec.NONE, Codec.INT8)) == [Codec.NONE, Codec.NONE, Codec.INT8]
    assert codecs([100e6, 100e6, 1e6], allowed=()) == [Codec.NONE] * 3
    assert codecs([100e6, 100e6, 100e6, 1e6], Averaging(by_line=True, robust=True))[-1] == Codec.INT8


@pytest.mark.parametrize("lines", [[], [1e6], [0.0] * 4, [5e6, 0.0, math.inf], [7e6] * 5, [1e6, 1e9, 1e9][:1]])
def test_where_nothing_is_known_or_slow_all_send_as_the_run_says(lines: list[float]) -> None:
    assert codecs(lines) == [Codec.NONE] * len(lines)
    assert kept(lines) == [0.05] * len(lines)


def test_all_end_together_by_topk_within_bounds() -> None:
    lines = [100e6, 100e6, 200e6, 25e6, 1.0, 1e15]
    shares = kept(lines)
    assert shares[:2] == [0.05, 0.05] and shares[2] == pytest.approx(0.1) and shares[3] == pytest.approx(0.0125)
    assert shares[4] == pytest.approx(0.05 * FEWEST) and shares[5] == pytest.approx(0.05 * MOST)
    assert max(kept(lines, Codec.TOPK2, 0.5)) == 1.0, "no more than all"


def test_one_line_that_is_a_lie_changes_nobody_elses() -> None:
    honest = [50e6] * 5
    for lie_bps in (1e-3, 1e15):
        assert codecs([*honest, lie_bps])[:5] == [Codec.NONE] * 5 and kept([*honest, lie_bps])[:5] == [0.05] * 5


def test_a_run_says_whether_lines_decide() -> None:
    assert codecs([100e6, 1e3], Averaging()) == [Codec.NONE] * 2
    assert codecs_by_line(Averaging(codec=Codec.TOPK, by_line=True), LADDER) == (Codec.TOPK,)
    with pytest.raises(UsageError, match="without factors"):
        check_run(Run(bytes(32), 10, 8, 1, averaging=Averaging(rank=4, by_line=True)))
