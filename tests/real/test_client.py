"""The Python client: the ring, and a swarm as a transformers model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

import swarmnode
from swarmnode.errors import UsageError
from swarmnode.sync_client import SyncSwarm
from tests.real.conftest import PROMPT, Stages, TinyModel

NEW = 12


@pytest.fixture(scope="module")
def whole(tiny: TinyModel) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny.folder).eval()


@pytest.fixture
def swarm(stages: Stages) -> Iterator[SyncSwarm]:
    with swarmnode.connect(stages.local.file, home=stages.local.folder / "client") as swarm:
        yield swarm


class OnlyEven(LogitsProcessor):
    """Lets the model say even tokens only."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 1::2] = -torch.inf
        return scores


def test_ring_and_stream_give_the_single_process_text(swarm: SyncSwarm, tiny: TinyModel) -> None:
    expected = tiny.alone(PROMPT, NEW)
    assert swarm.generate(PROMPT, max_new_tokens=NEW).ids == expected
    stream = swarm.stream(PROMPT, max_new_tokens=NEW)
    assert [piece.id for piece in stream] == expected
    assert stream.result.text is None, "this checkpoint has no tokenizer"


def test_sampling_is_a_function_of_the_seed(swarm: SyncSwarm) -> None:
    options = {"max_new_tokens": NEW, "temperature": 1.5, "top_k": 50}
    first = swarm.generate(PROMPT, seed=7, **options).ids
    assert swarm.generate(PROMPT, seed=7, **options).ids == first
    assert swarm.generate(PROMPT, seed=8, **options).ids != first


@pytest.mark.parametrize("hold_ends", [False, True], ids=["whole model remote", "ends held here"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False, "length_penalty": 0.5},
        {"do_sample": False, "logits_processor": LogitsProcessorList([OnlyEven()])},
        {"do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    ],
    ids=["greedy", "beams", "logits processor", "penalties"],
)
def test_transformers_generate(swarm: SyncSwarm, whole: Any, options: dict[str, Any], hold_ends: bool) -> None:
    ids = torch.tensor([PROMPT])
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "pad_token_id": 0, **options}
    expected = whole.generate(ids, **arguments)
    model = swarm.causal_lm(hold_ends=hold_ends)
    assert torch.equal(model.generate(ids, **arguments), expected)


def test_a_padded_batch(swarm: SyncSwarm, whole: Any) -> None:
    ids = torch.tensor([[0, 0, 0, *PROMPT[:5]], PROMPT])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
    assert torch.equal(swarm.causal_lm().generate(ids, **arguments), whole.generate(ids, **arguments))


def test_logits_of_every_position(swarm: SyncSwarm, whole: Any) -> None:
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        torch.testing.assert_close(swarm.causal_lm()(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-4)


def test_wrong_input_is_the_users_mistake(swarm: SyncSwarm) -> None:
    for prompt, words in (([], "no tokens"), ([511, 512], "vocabulary"), ("text", "no tokenizer")):
        with pytest.raises(UsageError, match=words):
            swarm.generate(prompt, max_new_tokens=2)
    with pytest.raises(UsageError, match="left padding"):
        ids = torch.tensor([PROMPT])
        swarm.causal_lm().generate(ids, attention_mask=torch.tensor([[1] * 7 + [0]]), max_new_tokens=2)


async def test_sessions_run_together_and_apart_alike(stages: Stages, tiny: TinyModel) -> None:
    prompts = [PROMPT[: 2 + number] * (1 + number % 3) for number in range(6)]
    async with stages.client() as client:
        together = await asyncio.gather(*(client.generate(prompt, max_new_tokens=24) for prompt in prompts))
    assert [result.ids for result in together] == [tiny.alone(prompt, 24) for prompt in prompts]
