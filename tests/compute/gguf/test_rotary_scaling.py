"""Rotary scaling of GGUF files: what llama.cpp computes with the same file, for combinations of keys and factors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swarmnode.compute.gguf.gguf import GgufCheckpoint
from swarmnode.compute.model.checkpoint import load_config
from swarmnode.errors import CheckpointError
from tests.compute.model.llama_gguf import HEADS, HIDDEN, WORDS, save_llama_gguf

PAIRS = HIDDEN // HEADS // 2
FREQUENCIES = {"rope_freqs.weight": [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]}
LISTS = {
    "rope_factors_long.weight": [9.0] * PAIRS,
    "rope_factors_short.weight": [1.0, 1.25, 1.5, 2.0, 2.0, 3.0, 3.0, 3.0],
}
PROMPT = random.Random(1).choices(range(len(WORDS)), k=96)
END = 11  # llama.cpp's own, of a file that names none
KEYS: dict[str, Any] = {
    "type": ("none", "linear", "yarn"),
    "factor": (1.0, 4.0),
    "original_context_length": (64,),
    "attn_factor": (1.0, 1.25),
    "yarn_beta_fast": (32.0,),  # llama.cpp reads other ones for a few architectures alone
    "yarn_ext_factor": (-1.0,),
}


def write(path: Path, said: dict[str, Any], beside: dict[str, Sequence[float]], architecture: str = "llama") -> None:
    def say(writer: Any) -> None:
        for name, value in said.items():
            key = name if "." in name else f"rope.scaling.{name}"
            (
                writer.add_string
                if isinstance(value, str)
                else writer.add_uint32
                if isinstance(value, int)
                else writer.add_float32
            )(f"{architecture}.{key}", value)

    save_llama_gguf(path, form="F32", sharp=True, say=say, beside=beside, architecture=architecture)


def combinations() -> list[tuple[dict[str, Any], dict[str, Sequence[float]]]]:
    """Every type and kind of factors, each with a few settings of the other keys, some of them missing."""
    chance = random.Random(0)
    found = []
    for kind, beside in itertools.product((None, *KEYS["type"], "longrope"), ({}, FREQUENCIES, LISTS)):
        if (kind == "longrope") != (beside is LISTS):  # llama.cpp loads no others
            continue
        for _ in range(4):
            said = {
                name: chance.choice(values) for name, values in KEYS.items() if name != "type" and chance.random() < 0.7
            }
            found.append(({**said, **({} if kind is None else {"type": kind})}, beside))
    return found


def told_by_llama_cpp(path: Path) -> dict[int, float]:
    """Log-probabilities of the likeliest tokens after PROMPT."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is the reference")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.cpuparams.n_threads = str(path), 256, 1, 1
    params.warmup = False
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    # Parts of characters are not reported, so none is drawn.
    banned = [[token, False] for token, word in enumerate(WORDS) if len(word) > 1 or not word.isascii() or token == END]
    asked = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "n_probs": 8, "logit_bias": banned}
    answer = xllamacpp.Server(params).handle_completions(asked)
    return {one["id"]: one["logprob"] for one in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}


def told_by_us(path: Path, folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    GgufCheckpoint(path).write(folder)
    with torch.no_grad():
        return (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([PROMPT]))
            .logits[0, -1]
            .log_softmax(-1)
        )


@pytest.mark.parametrize(("said", "beside"), combinations(), ids=str)
def test_scalings_are_llama_cpps(tmp_path: Path, said: dict[str, Any], beside: dict[str, Sequence[float]]) -> None:
    write(tmp_path / "a.gguf", said, beside)
    wanted = told_by_llama_cpp(tmp_path / "a.gguf")
    found = told_by_us(tmp_path / "a.gguf", tmp_path / "ours")
    assert {token: float(found[token]) for token in wanted} == pytest.approx(wanted, abs=2e-3)


@pytest.mark.parametrize(("fast", "slow", "original"), list(itertools.product((32.0, 8.0), (1.0, 2.0), (64, 2048))))
def test_yarn_beside_factors_is_transformers_yarn(tmp_path: Path, fast: float, slow: float, original: int) -> None:
    said = {
        "type": "yarn",
        "factor": 4.0,
        "yarn_beta_fast": fast,
        "yarn_beta_slow": slow,
        "original_context_length": original,
    }
    found = []
    for name, beside in (("plain", {}), ("factors", {"rope_freqs.weight": [2.0] * PAIRS})):
        write(tmp_path / f"{name}.gguf", said, beside)
        (tmp_path / name).mkdir()
        GgufCheckpoint(tmp_path / f"{name}.gguf").write(tmp_path / name)
        config = load_config(tmp_path / name / "config.json")
        found.append(ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, torch.device("cpu")))
    (plain, attention), (divided, same) = found
    torch.testing.assert_close(divided, plain / 2)
    assert attention == pytest.approx(same)


REFUSED: list[tuple[dict[str, Any], dict[str, Sequence[float]], str]] = [
    ({"type": "spiral"}, {}, "scaled by spiral"),
    ({"type": "longrope"}, {}, "longrope, and it has no rope_factors_long"),
    ({"type": "longrope", "factor": 4.0}, {}, "longrope, and it has no rope_factors_long"),
    ({"type": "linear", "factor": -2.0}, {}, "rope.scaling.factor is -2.0"),
    ({"factor": float("nan")}, {}, "rope.scaling.factor is nan"),
    ({"factor": float("inf"), "type": "yarn"}, {}, "rope.scaling.factor is inf"),
    ({"attn_factor": -1.0}, {}, "rope.scaling.attn_factor is -1.0"),
    ({"type": "linear", "factor": 2.0, "yarn_ext_factor": 1.0}, {}, "yarn_ext_factor is 1.0"),
    ({"type": "yarn", "factor": 2.0, "yarn_ext_factor": 0.0}, {}, "yarn_ext_factor is 0.0"),
    ({"yarn_attn_factor": 0.5}, {}, "yarn_attn_factor is 0.5"),
    ({}, {"rope_freqs.weight": [1.0] * (PAIRS - 1)}, f"rope_freqs.weight has not {PAIRS} numbers"),
    ({}, {"rope_freqs.weight": [1.0] * (PAIRS - 1) + [0.0]}, f"rope_freqs.weight has not {PAIRS} numbers"),
    ({}, {"rope_freqs.weight": [1.0] * (PAIRS - 1) + [float("nan")]}, f"rope_freqs.weight has not {PAIRS} numbers"),
    *(
        ({"type": "longrope"}, {name: numbers}, "which it needs beside its counterpart")
        for name, numbers in LISTS.items()
    ),
]


@pytest.mark.parametrize(("said", "beside", "told"), REFUSED, ids=str)
def test_scalings_that_mean_nothing_are_refused_by_name(
    tmp_path: Path, said: dict[str, Any], beside: dict[str, Sequence[float]], told: str
) -> None:
    write(tmp_path / "a.gguf", said, beside)
    (tmp_path / "ours").mkdir()
    with pytest.raises(CheckpointError, match=told):
        GgufCheckpoint(tmp_path / "a.gguf").write(tmp_path / "ours")
