"""The Python client: the ring, and a swarm as a transformers model."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.errors import UsageError
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.turns import Turns
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import PROMPT, TinyModel

NEW = 12
REMOTE_ENDS = pytest.mark.parametrize("hold_ends", [False, True], ids=["whole model remote", "ends held here"])


@pytest.fixture(scope="module")
def whole(tiny: TinyModel) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny.folder).eval()


@contextlib.asynccontextmanager
async def two_stages(founded: Founded, folder: Path) -> AsyncIterator[SwarmClient]:
    async with VirtualSwarm(folder) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        for name, span in (("a", "0:3"), ("b", "3:6")):
            await swarm.node(name, span).wait_for("ready")
        async with swarm.client() as client:
            yield client


@contextlib.asynccontextmanager
async def causal_lm(founded: Founded, folder: Path, *, hold_ends: bool = False) -> AsyncIterator[tuple[Turns, Any]]:
    """The swarm as a transformers model, which asks the virtual loop when it is that one's turn."""
    async with two_stages(founded, folder) as client:
        turns, model = Turns(), await client.acausal_lm(hold_ends=hold_ends)
        model.run = turns.ask
        yield turns, model


class OnlyEven(LogitsProcessor):
    """Lets the model say even tokens only."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 1::2] = -torch.inf
        return scores


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "length_penalty": 0.5},
    "logits processor": {"logits_processor": LogitsProcessorList([OnlyEven()])},
    "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
}


@in_virtual_time
async def test_ring_and_stream_give_the_single_process_text(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    expected = tiny.alone(PROMPT, NEW)
    async with two_stages(founded, tmp_path) as client:
        assert (await client.generate(PROMPT, max_new_tokens=NEW)).ids == expected
        stream = await client.stream(PROMPT, max_new_tokens=NEW)
        assert [piece.id async for piece in stream] == expected
        assert stream.result.text is None, "this checkpoint has no tokenizer"


@in_virtual_time
async def test_sampling_is_a_function_of_the_seed(founded: Founded, tmp_path: Path) -> None:
    async with two_stages(founded, tmp_path) as client:

        async def draw(seed: int) -> list[int]:
            options = {"max_new_tokens": NEW, "temperature": 1.5, "top_k": 50}
            return (await client.generate(PROMPT, seed=seed, **options)).ids

        first = await draw(7)
        assert await draw(7) == first
        assert await draw(8) != first


@in_virtual_time
async def test_the_last_hop_penalises_repetition_as_transformers_does(
    founded: Founded, whole: Any, tmp_path: Path
) -> None:
    expected = whole.generate(
        torch.tensor([PROMPT]), max_new_tokens=NEW, repetition_penalty=1.5, do_sample=False, pad_token_id=0
    )
    async with two_stages(founded, tmp_path) as client:
        result = await client.generate(PROMPT, max_new_tokens=NEW, repetition_penalty=1.5, logprobs=1)
        assert result.ids == expected[0, len(PROMPT) :].tolist()
        assert [told[0].id for told in result.logprobs] == result.ids
        assert all(own.logprob <= most.logprob <= 0 for own, most in result.logprobs)


@in_virtual_time
async def test_sessions_run_together_and_apart_alike(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    prompts = [PROMPT[: 2 + number] * (1 + number % 3) for number in range(6)]
    async with two_stages(founded, tmp_path) as client:
        together = await asyncio.gather(*(client.generate(prompt, max_new_tokens=24) for prompt in prompts))
    assert [result.ids for result in together] == [tiny.alone(prompt, 24) for prompt in prompts]


@REMOTE_ENDS
@in_virtual_time
async def test_transformers_generate(founded: Founded, whole: Any, tmp_path: Path, hold_ends: bool) -> None:
    ids = torch.tensor([PROMPT])
    async with causal_lm(founded, tmp_path, hold_ends=hold_ends) as (turns, model):
        for way, options in WAYS.items():
            arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "pad_token_id": 0, **options}
            ours = await turns.run(lambda: model.generate(ids, do_sample=False, **arguments))  # noqa: B023
            assert torch.equal(ours, whole.generate(ids, do_sample=False, **arguments)), way


@REMOTE_ENDS
@in_virtual_time
async def test_transformers_drafts(
    founded: Founded, whole: Any, tmp_path: Path, hold_ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Drafts of transformers itself: rejected ones are cut off, and the text is that of plain decoding."""
    prompt = torch.tensor([[*PROMPT, *PROMPT[:4]]])
    arguments = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": NEW,
        "pad_token_id": 0,
        "do_sample": False,
    }
    expected = whole.generate(prompt, **arguments)
    poor = copy.deepcopy(whole)
    with torch.no_grad():
        poor.lm_head.weight += 0.05 * torch.randn(poor.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
    drafts = {"look-up": {"prompt_lookup_num_tokens": 3}, "poor assistant": {"assistant_model": poor}}
    async with causal_lm(founded, tmp_path, hold_ends=hold_ends) as (turns, model):
        for way, options in drafts.items():
            asked: list[int] = []
            step = model._step
            model._step = lambda cache, ids, want, step=step, asked=asked: (
                asked.append(ids.shape[1]) or step(cache, ids, want)
            )
            ours = await turns.run(lambda: model.generate(prompt, **arguments, **options))  # noqa: B023
            model._step = step
            assert torch.equal(ours, expected), way
            assert max(asked[1:]) > 1, f"{way} sends several positions at once"
        with caplog.at_level("WARNING"):
            ours = await turns.run(lambda: model.generate(prompt, **arguments, num_beams=2, prompt_lookup_num_tokens=3))
        assert torch.equal(ours, whole.generate(prompt, **arguments, num_beams=2))
        assert "some of the set flags will be ignored" in caplog.text, "beam search goes without drafts, with a notice"
        with pytest.raises(UsageError, match="use_mtp"):
            await turns.run(lambda: model.generate(prompt, **arguments, use_mtp=True))


@in_virtual_time
async def test_a_padded_batch(founded: Founded, whole: Any, tmp_path: Path) -> None:
    ids = torch.tensor([[0, 0, 0, *PROMPT[:5]], PROMPT])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
    async with causal_lm(founded, tmp_path) as (turns, model):
        ours = await turns.run(lambda: model.generate(ids, **arguments))
    assert torch.equal(ours, whole.generate(ids, **arguments))


@in_virtual_time
async def test_logits_of_every_position(founded: Founded, whole: Any, tmp_path: Path) -> None:
    ids = torch.tensor([PROMPT])
    async with causal_lm(founded, tmp_path) as (turns, model):
        ours = await turns.run(lambda: model(ids))
    with torch.inference_mode():
        torch.testing.assert_close(ours.logits, whole(ids).logits, rtol=1e-4, atol=1e-4)


@in_virtual_time
async def test_wrong_input_is_the_users_mistake(founded: Founded, tmp_path: Path) -> None:
    async with causal_lm(founded, tmp_path) as (turns, model):
        ids, mask = torch.tensor([PROMPT]), torch.tensor([[1] * 7 + [0]])
        with pytest.raises(UsageError, match="left padding"):
            await turns.run(lambda: model.generate(ids, attention_mask=mask, max_new_tokens=2))
    (
        second := tmp_path / "second"
    ).mkdir()  # in the first one's folder its client would draw who the first one's node is
    async with two_stages(founded, second) as client:
        for prompt, words in (([], "no tokens"), ([511, 512], "vocabulary"), ("text", "no tokenizer")):
            with pytest.raises(UsageError, match=words):
                await client.generate(prompt, max_new_tokens=2)
