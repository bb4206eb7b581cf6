"""What is done to logits is what transformers and OpenAI's API define; and a draw depends on the text so far, whoever drew that."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from swarmnode.codec.sampling import Sampling, pack_text, unpack_logprobs
from swarmnode.compute.serving.device_transfers import DeviceOutputs
from swarmnode.compute.serving.sampler import Drawn, Sampler, TokenHistory, adjust, uniform

VOCABULARY = 300
PROMPT = [5, 17, 5, 200, 42]
SAID = [7, 7, 17, 9]
POSITION = len(PROMPT) + len(SAID)


def logits(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows)) * 3


def sampling(**fields: Any) -> Sampling:
    return Sampling(len(PROMPT), 100, **fields)


def adjusted(**fields: Any) -> torch.Tensor:
    parameters, history, logits_V = sampling(**fields), TokenHistory(len(PROMPT), 100), logits()[0]
    history.set(0, [*PROMPT, *SAID])
    adjust(logits_V, parameters, history, POSITION)
    return logits_V


def by_transformers(*processors: LogitsProcessor) -> torch.Tensor:
    scores_BV = logits()
    for processor in processors:
        scores_BV = processor(torch.tensor([[*PROMPT, *SAID]]), scores_BV)
    return scores_BV[0]


@pytest.mark.parametrize("penalty", [0.6, 1.3, 2.0])
def test_the_repetition_penalty_is_transformers_own(penalty: float) -> None:
    expected_V = by_transformers(RepetitionPenaltyLogitsProcessor(penalty))
    assert torch.equal(adjusted(repetition_penalty=penalty), expected_V)


def test_biases_are_transformers_own() -> None:
    biases = ((3, 4.5), (17, -100.0), (299, 0.25))
    expected_V = by_transformers(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases]))
    assert torch.equal(adjusted(logit_bias=biases), expected_V)


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 1.25), (-0.75, 2.0)])
def test_frequency_and_presence_count_what_was_generated(frequency: float, presence: float) -> None:
    """As OpenAI's API reference has it: mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence."""
    expected_V = logits()[0]
    for token, count in Counter(SAID).items():
        expected_V[token] -= count * frequency + presence
    assert torch.equal(adjusted(frequency_penalty=frequency, presence_penalty=presence), expected_V)


@pytest.mark.parametrize("temperature", [0.7, 1.6])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.01, 0.2])
def test_min_p_keeps_what_transformers_keeps(min_p: float, top_p: float, temperature: float) -> None:
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    scores_V = by_transformers(*warpers, MinPLogitsWarper(min_p)).double()
    ordered, ids = torch.sort(scores_V, descending=True, stable=True)
    cumulated = ordered.softmax(0).cumsum(0)
    sampler = Sampler(sampling(temperature=temperature, top_p=top_p, min_p=min_p), 1000)
    for position in range(100):
        wanted = ids[(cumulated <= uniform(0, 0, position) * cumulated[-1]).sum()]
        assert drawn_by(sampler, logits(), position)[0].ids == (int(wanted),)


def drawn_by(sampler: Sampler, logits_KV: torch.Tensor, first: int) -> Sequence[Drawn]:
    outputs = DeviceOutputs()
    draw = sampler.launch(logits_KV[None], first, outputs)
    return draw(outputs.fetch())


PARAMETERS = {"temperature": 0.9, "repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": -0.3}
STEPS = 12


@pytest.mark.parametrize("known", range(STEPS))
def test_a_sampler_that_is_told_the_text_goes_on_as_the_one_before_it(known: int) -> None:
    """And several positions at once, as after a replay, are drawn as one by one."""
    logits_KV, first = logits(STEPS) / 4, len(PROMPT)
    one = Sampler(sampling(seed=3, **PARAMETERS), 100)
    one.tell(pack_text(PROMPT))
    text = [drawn_by(one, logits_KV[step : step + 1], first + step)[0].ids[0] for step in range(STEPS)]
    other = Sampler(sampling(seed=3, **PARAMETERS), 100)
    other.tell(pack_text([*PROMPT, *text[:known]]))
    assert [drawn.ids[0] for drawn in drawn_by(other, logits_KV[known:], first + known)] == text[known:]
    assert len(set(text)) > 3


def test_logprobs_are_the_models_own() -> None:
    sampler = Sampler(sampling(temperature=0.0, logprobs=3, logit_bias=((11, 100.0),)), 100)
    told = unpack_logprobs(drawn_by(sampler, logits(), len(PROMPT))[0].logprobs)
    expected_V = logits()[0].log_softmax(0)
    values, ids = expected_V.topk(3)
    assert [one.id for one in told] == [11, *ids.tolist()]
    assert [one.logprob for one in told] == pytest.approx([float(expected_V[11]), *values.tolist()])


def test_logprobs_of_a_small_vocabulary_are_all_that_there_are() -> None:
    sampler = Sampler(sampling(logprobs=20), 100)
    told = unpack_logprobs(drawn_by(sampler, torch.zeros(1, 4), len(PROMPT))[0].logprobs)
    assert len(told) == 5 and told[0].logprob == pytest.approx(math.log(0.25))


def test_a_text_beyond_the_session_is_cut() -> None:
    sampler = Sampler(sampling(repetition_penalty=1.5), 3)
    sampler.tell(pack_text(range(50)))
    assert drawn_by(sampler, logits(), 3)[0].position == 3
