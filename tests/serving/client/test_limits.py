"""What cannot be asked of a model is refused before anything is sent, and the user is told what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config

from swarmnode.errors import UsageError
from swarmnode.serving.client.causal_lm import RemoteCausalLM
from swarmnode.serving.client.client_session import ClientSession
from swarmnode.serving.client.generation import GenerateOptions
from swarmnode.serving.client.limits import ModelLimits
from swarmnode.serving.client.session_spec import SessionSpec

TABLE = ModelLimits(vocabulary=97, positions=32)
ROTARY = ModelLimits(vocabulary=97)


def test_what_fits_is_taken() -> None:
    assert TABLE.ids(torch.tensor([0, 96])) == [0, 96]
    TABLE.check_generation(30, 3)  # the third one is drawn after position 31, and takes none itself
    ROTARY.check_generation(100_000, 100_000)
    assert (TABLE.room(30), TABLE.room(32), ROTARY.room(32)) == (31, 32, 33)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "no tokens"),
        ([3, -1], "token id -1 is negative"),
        ([3, 97], "token id 97 is not in the model's vocabulary of 97"),
        ([3, 1 << 70], "not in the model's vocabulary"),
        ([3, 1.0], "1.0 is neither"),
        (["a"], "'a' is neither"),
    ],
)
def test_wrong_prompts(prompt: list[Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TABLE.ids(prompt)


@pytest.mark.parametrize(
    ("length", "new", "words"),
    [
        (33, 1, "has 33 tokens, the model has 32 positions"),
        (30, 4, "at most 3 new tokens"),
        (32, 2, "at most 1 new tokens"),
    ],
)
def test_generations_past_the_last_position(length: int, new: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TABLE.check_generation(length, new)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 1 << 40},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -1},
        {"top_k": 1 << 40},
        {"seed": -1},
        {"stop_ids": (-1,)},
        {"stop_ids": tuple(range(65))},
    ],
    ids=str,
)
def test_options_that_would_not_travel(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        GenerateOptions(**options)


@pytest.fixture
def model() -> RemoteCausalLM:
    """A GPT-2 of which every session that is opened is one too many."""

    def open_session(spec: SessionSpec) -> ClientSession:
        raise AssertionError(f"something was sent: {spec}")

    config = GPT2Config(n_positions=32, n_embd=8, n_layer=2, n_head=2, vocab_size=97, bos_token_id=1, eos_token_id=None)
    return RemoteCausalLM(config, open_session, lambda coroutine: coroutine.close(), limits=TABLE)


IDS_BT = torch.tensor([[5, 17, 3]])
MISTAKES: dict[str, tuple[Callable[[RemoteCausalLM], object], str]] = {
    "a negative id": (lambda model: model(torch.tensor([[5, -1]])), "negative"),
    "an id too high": (lambda model: model.generate(torch.tensor([[5, 97]]), max_new_tokens=2), "vocabulary"),
    "floats": (lambda model: model(IDS_BT.float()), "whole numbers"),
    "no rows": (lambda model: model(torch.tensor([5, 17])), "shape"),
    "no tokens": (lambda model: model(torch.empty((1, 0), dtype=torch.int64)), "whole numbers"),
    "too many positions": (lambda model: model.generate(IDS_BT, max_new_tokens=40), "positions"),
    "too long a prompt": (lambda model: model(IDS_BT.repeat(1, 11)), "positions"),
    "too many rows": (lambda model: model(IDS_BT.repeat(300, 1)), "sequences at once"),
    "a row of padding": (lambda model: model(IDS_BT, attention_mask=torch.zeros_like(IDS_BT)), "without any token"),
    "a mask of other rows": (lambda model: model(IDS_BT, attention_mask=torch.tensor([[0, 1, 1]] * 2)), "as many rows"),
    "another model's cache": (lambda model: model(IDS_BT, cache=object()), "new_cache"),
    "another model's cache, as it was called": (lambda model: model(IDS_BT, past_key_values=object()), "new_cache"),
}  # type: ignore[dict-item]


@pytest.mark.parametrize(("ask", "words"), MISTAKES.values(), ids=MISTAKES)
def test_wrong_tensors_are_refused_before_anything_is_sent(
    model: RemoteCausalLM, ask: Callable[[RemoteCausalLM], object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        ask(model)
