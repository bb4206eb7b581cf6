"""The choice of codecs: no more compression than takes a link off the critical path, and no flapping."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.plan.compression import (
    CLEARLY,
    FORMS,
    HURRY,
    LADDER,
    NARROW,
    PATIENCE,
    BoundaryForm,
    LinkCodecs,
    choose_form,
    encoded_bytes,
)

HIDDEN = TensorInfo(Codec.NONE, DType.FLOAT32, (4, 128, 512))  # 1 MiB
IDS = TensorInfo(Codec.NONE, DType.INT64, (4, 128))


def settled(codecs: LinkCodecs[str], bandwidth_bps: float | None, beat_s: float, looks: int = 100) -> Codec:
    for _ in range(looks):
        codecs.choose("link", (HIDDEN, IDS), bandwidth_bps, beat_s)
    return codecs.choices["link"].codec


@pytest.mark.parametrize(
    ("bandwidth_bps", "beat_s", "codec"),
    [
        (8e6, 0.3, Codec.INT4),  # nothing keeps up: the strongest
        (8e6, 0.6, Codec.INT8),
        (50e6, 0.3, Codec.NONE),
        (50e6, 0.15, Codec.BF16),
        (50e6, 0.1, Codec.INT8),
        (500e6, 0.3, Codec.NONE),
        (500e6, 0.03, Codec.NONE),
        (None, 0.3, Codec.NONE),
        (8e6, 0.0, Codec.NONE),
    ],
)
def test_the_mildest_that_keeps_up(bandwidth_bps: float | None, beat_s: float, codec: Codec) -> None:
    assert settled(LinkCodecs[str](LADDER), bandwidth_bps, beat_s) == codec


def test_a_bottleneck_has_8_bits_at_least() -> None:
    codecs = LinkCodecs[str](LADDER, demands=NARROW)
    assert settled(codecs, None, 0.3) == settled(codecs, 500e6, 0.3) == Codec.INT8
    assert settled(codecs, 8e6, 0.3) == Codec.INT4


@given(
    line_bps=st.floats(1e5, 1e11),
    tokens_per_s=st.floats(1, 1e6),
    hidden=st.integers(64, 8192),
    steps=st.lists(st.floats(1, 50), min_size=2, max_size=2),
)
def test_a_bottleneck_only_where_the_curve_says_that_it_wins(
    line_bps: float, tokens_per_s: float, hidden: int, steps: list[float]
) -> None:
    codecs = [form for form in FORMS if form.divisor == 1]
    forms = [*codecs, *(BoundaryForm(divisor, Codec.INT8, one) for divisor, one in zip((8, 16), steps, strict=True))]

    def seconds(form: BoundaryForm) -> float:
        return form.steps * max(1 / tokens_per_s, 8 * form.token_bytes(hidden) / line_bps)

    chosen = choose_form(line_bps, tokens_per_s, hidden, forms)
    best_codec_s = min(map(seconds, codecs))
    if chosen.divisor > 1:
        assert seconds(chosen) * CLEARLY <= best_codec_s * 1.001
    else:
        assert seconds(chosen) <= best_codec_s * 1.001
        assert all(seconds(form) * CLEARLY >= best_codec_s * 0.999 for form in forms[len(codecs) :])
    if line_bps > 8 * tokens_per_s * FORMS[0].token_bytes(hidden):
        assert chosen == FORMS[0], "the mildest that keeps up"


def test_no_bottleneck_is_chosen_if_the_curve_says_that_it_loses() -> None:
    codecs = [form for form in FORMS if form.divisor == 1]
    forms = [*codecs, BoundaryForm(8, Codec.INT8, 6.0), BoundaryForm(16, Codec.INT8, 12.0)]
    lines = [choose_form(10.0**digits, 1e4, 2048, forms).divisor for digits in range(5, 12)]
    assert set(lines) == {1}


def test_stronger_soon_milder_late() -> None:
    codecs = LinkCodecs[str](LADDER)
    assert settled(codecs, 500e6, 0.3) == Codec.NONE
    assert settled(codecs, 8e6, 0.3, HURRY - 1) == Codec.NONE, "one slow transfer may be chance"
    assert settled(codecs, 8e6, 0.3, 1) == Codec.INT4
    assert settled(codecs, 500e6, 0.3, PATIENCE - 1) == Codec.INT4
    assert settled(codecs, 500e6, 0.3, 1) == Codec.INT8, "and then one rung at a time"
    assert settled(codecs, 500e6, 0.3, 2 * PATIENCE) == Codec.NONE


def test_a_link_that_wavers_does_not_flap() -> None:
    codecs = LinkCodecs[str](LADDER)
    settled(codecs, 25e6, 0.3)
    seen = set()
    for look in range(200):
        seen.add(settled(codecs, 25e6 if look % 3 else 60e6, 0.3, 1))
    assert len(seen) == 1


def test_bounds_of_the_swarm() -> None:
    assert settled(LinkCodecs[str]((Codec.NONE, Codec.BF16)), 8e6, 0.3) == Codec.BF16
    assert settled(LinkCodecs[str]((Codec.INT8,)), 500e6, 0.3) == Codec.INT8
    assert settled(LinkCodecs[str](()), 8e6, 0.3) == Codec.NONE


def test_the_reason_is_for_people() -> None:
    codecs = LinkCodecs[str](LADDER)
    settled(codecs, 8e6, 0.3)
    assert codecs.choices["link"].reason == (
        "1.05 MB at 8 Mbit/s take 1.05 s uncompressed, 0.152 s so; the slowest stage needs 0.3 s for a microbatch"
    )


@given(st.floats(1e5, 1e10), st.floats(1e5, 1e10), st.floats(1e-3, 10))
def test_a_slower_link_never_gets_less_compression(one_bps: float, other_bps: float, beat_s: float) -> None:
    slow, fast = (settled(LinkCodecs[str](LADDER), bps, beat_s, 20) for bps in sorted((one_bps, other_bps)))
    assert encoded_bytes([HIDDEN], slow) <= encoded_bytes([HIDDEN], fast)


def test_only_floats_are_compressed() -> None:
    assert encoded_bytes([HIDDEN, IDS], Codec.INT4) == 4 * 128 * 512 * 18 // 32 + 4 * 128 * 8
