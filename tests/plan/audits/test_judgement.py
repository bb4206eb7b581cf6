"""What is false, and what is honest noise."""

from __future__ import annotations

import math
import random

import pytest

from swarmnode.codec.tensors import Codec
from swarmnode.plan.audits import Calibration, Judgement, judge_states, judge_tokens, noise_of
from swarmnode.tolerances import FAR, MAX_FACTOR, NOISE, SPREAD, VOICES

TOLERANCE = Calibration().tolerance("bfloat16", Codec.NONE, units=8)


def honest(count: int, seed: int = 0) -> list[float]:
    """Deviations as the table has them, with its share beyond the limit."""
    dice = random.Random(seed)
    median = noise_of("bfloat16", Codec.NONE).median
    return [abs(dice.gauss(median, median / 3)) for _ in range(count)]


def test_honest_noise_passes_and_one_step_somewhat_off_is_an_accident() -> None:
    assert not judge_states(honest(512), TOLERANCE).false
    near = judge_states([*honest(511), 2 * TOLERANCE.deviation], TOLERANCE)
    assert (near.false, near.beyond) == (False, 1)


@pytest.mark.parametrize("size", [1.01 * FAR, 2 * FAR, math.inf, math.nan])
@pytest.mark.parametrize("count", [1, 19, 512])
def test_one_position_that_no_honest_peer_would_be_so_far_off_at_is_false(size: float, count: int) -> None:
    assert judge_states([*honest(count - 1), size * TOLERANCE.deviation], TOLERANCE).false


@pytest.mark.parametrize(
    ("farthest", "count"),  # times the tolerance; of so many positions
    [
        ([2.9, 2.6, 1.8], 16),
        ([6.2, 1.4], 16),
        ([16.5, 2.1, 1.7], 16),
        ([5.1, 2.9, 2.2, 2.1, 1.4, 1.2], 128),
    ],
    ids=["SmolLM2", "SmolLM2, farthest", "Gemma 3, farthest", "Gemma 3, most"],
)
def test_a_trained_models_tail_is_honest(farthest: list[float], count: int) -> None:
    """Behind 20 layers in float32, by AVX-512 and AVX2: three positions of a text were enough to shun a peer."""
    tolerance = Calibration().tolerance("float32", Codec.NONE, units=20)
    ratios = [*farthest, *[0.3] * (count - len(farthest))]
    judgement = judge_states([ratio * tolerance.deviation for ratio in ratios], tolerance)
    assert (judgement.false, judgement.near, judgement.beyond) == (False, False, len(farthest))


@pytest.mark.parametrize(("times", "enough"), [(1.5, 12), (2.5, 9), (5, 6), (10, 5), (15, 4), (40, 3), (129, 1)])
def test_the_farther_off_the_fewer_positions_are_enough(times: float, enough: int) -> None:
    tolerance = Calibration().tolerance("float32", Codec.NONE, units=20)
    for count in (enough - 1, enough):
        states = [0.0] * (64 - count) + [times * tolerance.deviation] * count
        assert judge_states(states, tolerance).false is (count == enough)


def test_every_tenth_step_at_ten_times_the_noise_is_false() -> None:
    steps = honest(128)
    steps[::10] = [10 * NOISE["bfloat16", Codec.NONE].median] * len(steps[::10])
    judgement = judge_states(steps, TOLERANCE)
    assert judgement.false
    assert judgement.beyond == 13


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_what_is_no_number_is_beyond_any_limit(strange: float) -> None:
    assert judge_states([strange] * 8, TOLERANCE).false


def test_tokens_may_differ_now_and_then() -> None:
    drawn = list(range(64))
    assert not judge_tokens(drawn, drawn, TOLERANCE).false
    assert not judge_tokens(drawn, [0, 0, 0, *drawn[3:]], TOLERANCE).false
    assert judge_tokens(drawn, [-1] * 20 + drawn[20:], TOLERANCE).false
    assert not judge_tokens([], [], TOLERANCE).false


def test_a_comparison_is_held_against_its_own_median() -> None:
    """Over an untaught Llama of 4 layers honest pairs lie three times as far apart as the table says: they were accused."""
    noisy = [3 * deviation for deviation in honest(128)]
    tolerance = Calibration().tolerance("bfloat16", Codec.NONE, units=8, deviations=noisy)
    assert not judge_states(noisy, tolerance).false
    noisy[::10] = [10 * 3 * NOISE["bfloat16", Codec.NONE].median] * len(noisy[::10])
    tolerance = Calibration().tolerance("bfloat16", Codec.NONE, units=8, deviations=noisy)
    assert judge_states(noisy, tolerance).false


def test_who_is_false_everywhere_is_not_held_against_itself() -> None:
    calibration, far = Calibration(), [0.08] * 64
    assert judge_states(far, calibration.tolerance("bfloat16", Codec.NONE, units=8, deviations=far)).false
    for number in range(VOICES):  # honest peers have shown how little this model's noise is
        calibration.record(f"peer {number}", "bfloat16", Codec.NONE, honest(9), units=8)
    near = [4 * NOISE["bfloat16", Codec.NONE].high] * 64
    assert judge_states(near, calibration.tolerance("bfloat16", Codec.NONE, units=8, deviations=near)).false


def test_a_models_noise_is_learnt_from_several_peers_and_only_so_far() -> None:
    calibration = Calibration()
    for number in range(VOICES - 1):
        calibration.record(f"peer {number}", "bfloat16", Codec.NONE, [0.0041] * 9, units=8)
    assert calibration.most == MAX_FACTOR, "too few voices"
    for _ in range(40):
        calibration.record("a liar", "bfloat16", Codec.NONE, [1.0] * 9, units=8)
    assert calibration.most == pytest.approx(SPREAD), "one voice of five"
    for number in range(40):
        calibration.record(f"another {number}", "bfloat16", Codec.NONE, [1.0] * 9, units=8)
    assert calibration.most == MAX_FACTOR


def test_through_an_adapter_honest_replicas_lie_farther_apart() -> None:
    """Nine of 19 positions at 2.5 times what is tolerated of the model alone would be false of it."""
    far = [0.0] * 10 + [2.5 * Calibration().tolerance("float32", Codec.NONE, units=3).deviation] * 9
    for adapted in (False, True):
        tolerance = Calibration().tolerance("float32", Codec.NONE, units=3, deviations=far, adapted=adapted)
        assert judge_states(far, tolerance).false is not adapted
    left_out = [1e-3] * 19
    tolerance = Calibration().tolerance("float32", Codec.NONE, units=3, deviations=left_out, adapted=True)
    assert judge_states(left_out, tolerance).false, "who leaves the adapter out is found"


def test_tolerances_grow_with_the_depth_and_unknown_formats_have_wide_ones() -> None:
    deep = Calibration().tolerance("bfloat16", Codec.NONE, units=32)
    assert deep.deviation == pytest.approx(2 * TOLERANCE.deviation)
    unknown = Calibration().tolerance("posit16", Codec.NONE, units=8)
    assert unknown.deviation > 10 * TOLERANCE.deviation
    assert noise_of("bfloat16-nf4", Codec.INT8) == NOISE["bfloat16", Codec.INT8]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.INT8])
def test_caches_in_8_bits_have_the_noise_of_bfloat16(dtype: str, codec: Codec) -> None:
    assert noise_of(f"{dtype}+kv8", codec) == noise_of(f"{dtype}+kv8-nf4", codec) == NOISE["bfloat16", codec]
    assert noise_of(f"{dtype}+kv4", codec) == noise_of("packed+kv4", codec) == noise_of("int3", codec)
    assert noise_of("packed+kv8", codec).median > noise_of("packed", codec).median > noise_of(dtype, codec).median


def test_a_text_after_a_replay_is_honest_with_caches_in_8_bits() -> None:
    """SmolLM2 behind 20 layers in float32, 384 positions decoded beside one prompt: median, of 99 % and largest deviation."""
    deviations = [*[5.26e-3] * 380, *[1.44e-2] * 3, 2.67e-2]
    assert not judge_states(deviations, Calibration().tolerance("float32+kv8", Codec.NONE, units=21)).near
    assert judge_states(deviations, Calibration().tolerance("float32", Codec.NONE, units=21)).false


MACHINES = [*[1.2e-2] * 120, *[2.4e-2] * 6, 3.6e-2, 0.16]
"""Deviations of SmolLM2 with fast products behind 10 layers, by two kinds of machines: median, of 99 % and largest"""

SMALLER = [*[0.08] * 12, *[0.17] * 103, *[0.26] * 13]
"""The same, of a peer whose matrices are rounded again, from Q4_1 to Q3_K and IQ4_NL: of 10 %, median and of 90 %"""


@pytest.mark.parametrize("voices", [0, VOICES])
def test_fast_products_are_honest_on_other_machines_and_false_from_a_smaller_format(voices: int) -> None:
    calibration = Calibration()
    for number in range(voices):  # on one kind of machine all bits are equal, which must not make others false
        calibration.record(f"peer {number}", "packed", Codec.NONE, [0.0] * 64, units=10)
    assert calibration == Calibration()
    for deviations, is_false in ((MACHINES, False), (SMALLER, True)):
        judged = judge_states(deviations, calibration.tolerance("packed", Codec.NONE, units=10, deviations=deviations))
        assert (judged.false, judged.near) == (is_false, False)
    unknown = calibration.tolerance("posit16", Codec.NONE, units=10, deviations=SMALLER)
    assert not judge_states(SMALLER, unknown).false, "without a row of its own this lie passed"


@pytest.mark.parametrize("number_format", ["bfloat16", "packed", "packed+kv8"])
def test_work_that_is_nearer_to_the_bound_than_honest_work_proves_nothing(number_format: str) -> None:
    """Three of 48 positions at five tolerances, or three times the noise at each, passed and raised the liar's trust."""
    noise, calibration = NOISE[number_format, Codec.NONE], Calibration()

    def judged(*far: float, factor: float = 1.0) -> Judgement:
        usual = [factor * noise.median] * (48 - len(far))
        tolerance = calibration.tolerance(number_format, Codec.NONE, units=8, deviations=usual)
        return judge_states([*usual, *(ratio * tolerance.deviation for ratio in far)], tolerance)

    assert judged().proves and judged(1.2).proves and judged(1.2, 2.0).proves
    few = judged(5.0, 5.0, 5.0)
    assert (few.false, few.near, few.proves) == (False, False, False)
    assert not judged(*[20.0] * 8).proves
    farther = judged(factor=1.6)
    assert (farther.false, farther.proves) == (False, number_format == "bfloat16"), "models differ by more in bfloat16"
