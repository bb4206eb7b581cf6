"""A multiple-choice task through lm-evaluation-harness scores a trained model as transformers does.

`recorded/lm_eval.jsonl` are bodies that its `local-completions` sent to `contrib/clients/evaluation.py`: prompts one each,
four together, and as texts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnode.client.tokenizer import Tokenizer
from swarmnode.compute.model import linear
from tests.gateway.conftest import MODEL, found_on, serving
from tests.net.virtual import in_virtual_time

RECORDED = Path(__file__).parent / "recorded" / "lm_eval.jsonl"
HALVES = {"a": "0:16", "b": "16:32"}


@pytest.fixture(scope="module")
def float32_folder(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("float32")
    auto: Any = AutoModelForCausalLM
    auto.from_pretrained(smollm2_folder, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2_folder).save_pretrained(folder)
    return folder


def prompts_of(body: dict[str, Any], tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of each of a body's prompts."""
    prompts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


class Reference:
    """transformers' logprobs of a prompt's tokens, and of what is most likely in their places."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        self._model = auto.from_pretrained(folder, dtype=torch.float32)

    def scores(self, ids: Sequence[int]) -> tuple[list[float], list[float]]:
        ids_T = torch.tensor(ids)
        with torch.inference_mode():
            logprobs_TV = self._model(ids_T[None]).logits[0, :-1].log_softmax(-1)
        return logprobs_TV.gather(1, ids_T[1:, None])[:, 0].tolist(), logprobs_TV.amax(-1).tolist()


@in_virtual_time
async def test_a_trained_model_scores_as_with_transformers(
    float32_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "MIN_ELEMENTS", sys.maxsize)  # other ways to multiply round otherwise, by some 1e-6
    reference, tokenizer = Reference(float32_folder), Tokenizer(float32_folder)
    ends = 0
    async with serving(found_on(float32_folder, tmp_path / "founded"), tmp_path, nodes=HALVES) as served:
        for line in RECORDED.read_text().splitlines():
            body = json.loads(line) | {"model": MODEL}
            told = (await served.http.post("/v1/completions", json=body)).json()
            for choice, ids in zip(told["choices"], prompts_of(body, tokenizer), strict=True):
                logprobs = choice["logprobs"]
                assert len(logprobs["tokens"]) == len(ids) + 1, "also where the one new token ends the text"
                ends += choice["finish_reason"] == "stop"
                own, best = reference.scores(ids)
                scores, likely = logprobs["token_logprobs"][1:-1], logprobs["top_logprobs"][1:-1]
                assert sum(scores) == pytest.approx(sum(own), rel=1e-6)
                for score, most, expected, most_expected in zip(scores, likely, own, best, strict=True):
                    assert (score == max(most.values())) == (expected == most_expected)
    assert ends, "the last line of the harness's answers is cut off with the new token"
