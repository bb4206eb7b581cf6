"""As what states travel: chosen by the link, and the same when they are sent again."""

from __future__ import annotations

import pytest

from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.plan.compression import (
    MAX_CHANGES,
    PROMPT,
    STEPS,
    CodecSchedule,
    Demands,
    LinkCodecs,
    coarsest,
)

SWARM = (Codec.NONE, Codec.BF16, Codec.FP16, Codec.INT8, Codec.INT4)
CHUNK, STEP = (TensorInfo(Codec.NONE, DType.FLOAT32, (1, count, 4096)) for count in (128, 1))


def chosen(
    states: TensorInfo, demands: Demands, bandwidth_bps: float, room_s: float, allowed: tuple[Codec, ...] = SWARM
) -> Codec:
    return LinkCodecs[str](allowed, demands=demands).choose("link", [states], bandwidth_bps, room_s).codec


@pytest.mark.parametrize(
    ("bandwidth_bps", "codec"),
    [(10e9, Codec.NONE), (200e6, Codec.BF16), (100e6, Codec.INT8), (20e6, Codec.INT4), (1e3, Codec.INT4)],
)
def test_a_prompt_is_compressed_until_the_link_keeps_up_with_the_passes(bandwidth_bps: float, codec: Codec) -> None:
    assert chosen(CHUNK, PROMPT, bandwidth_bps, room_s=0.06) is codec


@pytest.mark.parametrize(("bandwidth_bps", "codec"), [(200e6, Codec.NONE), (20e6, Codec.BF16), (2e6, Codec.INT8)])
def test_a_step_is_compressed_where_its_transfer_is_noticed(bandwidth_bps: float, codec: Codec) -> None:
    assert chosen(STEP, STEPS, bandwidth_bps, room_s=0.01 + 0.03) is codec


def test_only_what_the_swarm_allows_is_chosen() -> None:
    assert chosen(CHUNK, PROMPT, 1e6, 0.0, (Codec.NONE, Codec.BF16)) is Codec.BF16
    assert chosen(CHUNK, PROMPT, 1e6, 0.0, (Codec.TOPK,)) is Codec.NONE


def test_positions_are_cut_where_the_codec_changes() -> None:
    schedule = CodecSchedule(Codec.NONE, [(100, Codec.BF16), (0, Codec.INT8)])
    assert list(schedule.pieces(90, 110)) == [(90, 100, Codec.INT8), (100, 110, Codec.BF16)]
    assert list(schedule.pieces(0, 100)) == [(0, 100, Codec.INT8)]
    assert schedule.coarsest(100) is schedule.coarsest(200) is Codec.INT8
    assert coarsest([]) is Codec.NONE


def test_what_is_taken_back_is_chosen_anew() -> None:
    schedule = CodecSchedule(Codec.NONE, [(0, Codec.INT8), (100, Codec.BF16)])
    schedule.truncate(60)
    assert schedule.at(200) is Codec.INT8
    schedule.change(60, Codec.NONE)
    assert schedule.changes == ((0, Codec.INT8), (60, Codec.NONE))


def test_what_others_chose_is_taken_up_and_what_was_chosen_here_stands() -> None:
    schedule = CodecSchedule(Codec.NONE, [(0, Codec.INT8)])
    schedule.merge([(0, Codec.INT4), (50, Codec.BF16)])
    assert schedule.changes == ((0, Codec.INT8), (50, Codec.BF16))


def test_no_peer_makes_it_grow_without_bound() -> None:
    schedule = CodecSchedule(Codec.NONE, [(at, Codec.INT8) for at in range(10_000)])
    assert schedule.full and len(schedule.changes) == MAX_CHANGES
    schedule.merge([(at, Codec.BF16) for at in range(10_000, 20_000)])
    assert len(schedule.changes) == MAX_CHANGES
