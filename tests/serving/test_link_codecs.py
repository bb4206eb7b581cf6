"""One hop's choices, over the epochs and texts of a session; and what a client believes of them."""

from __future__ import annotations

import msgspec
import pytest

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Input, LinkCodec, Mode, Open
from swarmnode.codec.sampling import Sampling
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.errors import ErrorCode
from swarmnode.plan.compression import MAX_CHANGES
from swarmnode.plan.serving.scheduler import PassCost
from swarmnode.serving.client.client_session import ReportedCodecs
from swarmnode.serving.link_codecs import CodecRules, SessionCodecs

ROUTE = (HopSpec("a", 0, 3), HopSpec("b", 3, 6))
PROMPT = 100
SLOW_BPS = 1e6
OPENED = Open(
    bytes(16), 1, ROUTE, 0, Mode.RING, 1, 200, sampling=Sampling(prompt_length=PROMPT, max_new_tokens=50), adapts=True
)


def codecs(opened: Open = OPENED, bandwidth_bps: float | None = SLOW_BPS) -> SessionCodecs:
    made = SessionCodecs(opened, CodecRules(bandwidth_bps=lambda _peer: bandwidth_bps), width=1024)
    made.rebound(opened, accepted=0)
    return made


def look(of: SessionCodecs, start: int, end: int) -> list[LinkCodec]:
    return of.choose(start, end, rtt_s=0.0, cost=PassCost())


def test_a_codec_is_chosen_once_for_the_prompt_and_once_for_the_steps() -> None:
    chosen = codecs()
    assert look(chosen, 0, 64) == [LinkCodec(3, 0, Codec.INT4)]
    assert look(chosen, 64, PROMPT) == []
    assert look(chosen, PROMPT, PROMPT + 1) == [LinkCodec(3, PROMPT, Codec.INT8)]
    assert look(chosen, PROMPT + 1, PROMPT + 2) == []


def test_an_input_over_the_end_of_the_prompt_is_chosen_for_twice() -> None:
    chosen = codecs()
    assert [one.start for one in look(chosen, 90, 110)] == [90, PROMPT]
    assert [end - start for start, end, _ in chosen.schedule.pieces(90, 110)] == [10, 10]


def test_guesses_behind_a_step_do_not_change_its_codec() -> None:
    """Else a text with guesses would be computed of coarser states than without."""
    for bandwidth_bps, codec in ((100e6, Codec.NONE), (25e6, Codec.BF16), (1e6, Codec.INT8)):
        for guesses in (0, 8):
            (chosen,) = look(codecs(bandwidth_bps=bandwidth_bps), PROMPT, PROMPT + 1 + guesses)
            assert chosen == LinkCodec(3, PROMPT, codec)


def test_nothing_is_chosen_where_nobody_asked_or_nothing_is_known() -> None:
    assert look(codecs(msgspec.structs.replace(OPENED, adapts=False)), 0, 64) == []
    assert look(codecs(bandwidth_bps=None), 0, 64) == []


def test_who_takes_over_keeps_to_what_was_chosen() -> None:
    told = (LinkCodec(3, 0, Codec.INT8), LinkCodec(3, PROMPT, Codec.NONE), LinkCodec(5, 0, Codec.INT4))
    replay = codecs(msgspec.structs.replace(OPENED, epoch=2, known=120, codecs=told))
    assert look(replay, 0, 130) == []
    assert [codec for _, _, codec in replay.schedule.pieces(0, 130)] == [Codec.INT8, Codec.NONE]


def test_what_had_no_codec_when_tokens_were_drawn_from_it_has_none_when_it_comes_again() -> None:
    replay = codecs(msgspec.structs.replace(OPENED, epoch=2, known=120))
    (chosen,) = look(replay, 0, 130)
    assert chosen.start == 120
    assert replay.schedule.coarsest(120) is Codec.NONE


def test_another_text_has_choices_of_its_own() -> None:
    chosen = codecs()
    look(chosen, 0, 110)
    sampling = Sampling(prompt_length=150, max_new_tokens=50)
    chosen.rebound(msgspec.structs.replace(OPENED, epoch=2, sampling=sampling, known=150), accepted=110)
    assert [(one.start, one.codec) for one in look(chosen, 110, 150)] == [(110, Codec.INT4)]


def test_what_the_swarm_forbids_is_refused() -> None:
    rules = CodecRules(frozenset({Codec.NONE, Codec.BF16, Codec.TOPK}))
    for forbidden in (
        {"codec": Codec.INT8},
        {"codec": Codec.TOPK},
        {"codecs": (LinkCodec(3, 0, Codec.INT4),)},
    ):
        assert rules.refusal(msgspec.structs.replace(OPENED, **forbidden)) is ErrorCode.INVALID_REQUEST
    assert rules.refusal(OPENED) is None
    body = Input(TensorInfo(Codec.INT8, DType.FLOAT32, (1, 1, 64)))
    assert rules.wrong(body) is ErrorCode.MALFORMED


@pytest.mark.parametrize(
    "told",
    [
        *(LinkCodec(4, 0, Codec.INT8), LinkCodec(6, 0, Codec.INT8), LinkCodec(3, 500, 3)),
        LinkCodec(3, 0, Codec.TOPK),  # of a swarm that trains, too: with it no other hop would take the session over
    ],
)
def test_a_client_hears_only_of_what_a_hop_can_mean(told: LinkCodec) -> None:
    heard = ReportedCodecs(Codec.NONE)
    heard.record(told, ROUTE, max_length=200)
    assert heard.link_codecs == ()


def test_a_hop_that_chooses_without_end_fills_no_memory() -> None:
    heard = ReportedCodecs(Codec.NONE)
    for position in range(10_000):
        heard.record(LinkCodec(3, position, Codec.INT8), ROUTE, max_length=20_000)
    assert len(heard.link_codecs) == MAX_CHANGES
