"""With rotary frequencies that follow from a pass's longest row, nobody's numbers depend on neighbours or on cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Phi3Config, Phi3ForCausalLM

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.family import family_of, switching_position
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.loading import check_family, load_span
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput
from swarmnode.errors import CheckpointError

ORIGINAL, LONGEST = 16, 64  # positions
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": LONGEST,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": ORIGINAL,
}


@pytest.fixture(scope="module")
def span(tmp_path_factory: pytest.TempPathFactory) -> ModelSpan:
    folder: Path = tmp_path_factory.mktemp("longrope")
    torch.manual_seed(0)
    config = Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=ORIGINAL)
    Phi3ForCausalLM(config).save_pretrained(folder)
    checkpoint = Checkpoint(folder)
    return load_span(checkpoint, 0, checkpoint.units)


def ids_of(name: str, length: int) -> Tensor:
    return torch.randint(0, 99, (1, length), generator=torch.Generator().manual_seed(sum(name.encode())))


def generate(span: ModelSpan, lengths: dict[str, int], steps: list[int], chunk: int = 2048) -> dict[str, Tensor]:
    """Logits of sessions whose prompts have these lengths, and then so many positions each in steps taken together."""
    runner = StageRunner(span, RunnerConfig(1 << 22, prefill_positions=chunk))
    outputs: dict[str, list[Tensor]] = {name: [] for name in lengths}
    for name in lengths:
        runner.open(name, rows=1, max_length=LONGEST)
    done = dict.fromkeys(lengths, 0)
    for counts in [lengths, *(dict.fromkeys(lengths, count) for count in steps)]:
        works = []
        for name, count in counts.items():
            works.append(StepInput(name, ids_of(name, LONGEST)[:, done[name] : done[name] + count], WANT_ALL))
            done[name] += count
        for result in runner.run(works):
            outputs[str(result.session_id)].append(result.output)
    return {name: torch.cat(parts, dim=1) for name, parts in outputs.items()}


def test_short_sessions_beside_long_ones_get_what_they_get_alone(span: ModelSpan) -> None:
    lengths = {"short": 4, "near": ORIGINAL - 3, "long": 30}
    steps = [1, 1, 4, 1, 2, 1]  # "near" crosses over in the midst of one
    together = generate(span, lengths, steps)
    for name, length in lengths.items():
        alone = generate(span, {name: length}, steps)[name]
        torch.testing.assert_close(together[name], alone, atol=1e-5, rtol=1e-4, msg=name)


def test_how_a_prompt_is_cut_does_not_matter(span: ModelSpan) -> None:
    whole = generate(span, {"a": 40}, [])["a"]
    for chunk in (1, 7, 16, 25):
        torch.testing.assert_close(generate(span, {"a": 40}, [], chunk)["a"], whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(generate(span, {"a": 12}, [3, 1, 4, 20])["a"], whole, atol=1e-5, rtol=1e-4)


def test_up_to_its_original_length_the_model_is_transformers_own(span: ModelSpan) -> None:
    torch.manual_seed(0)
    config = Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=ORIGINAL)
    model = Phi3ForCausalLM(config).eval()
    ids_BT = ids_of("a", ORIGINAL)
    with torch.inference_mode():
        wanted = model(ids_BT).logits
    torch.testing.assert_close(generate(span, {"a": ORIGINAL}, [])["a"], wanted, atol=1e-5, rtol=1e-4)


def test_models_whose_frequencies_change_with_every_position_are_refused() -> None:
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0})
    with pytest.raises(CheckpointError, match="change with every position"):
        family_of(config)


def test_other_models_know_no_such_length() -> None:
    assert switching_position(LlamaConfig(**SIZES)) is None


@pytest.mark.parametrize("partial", [1.0, 0.75])
def test_heads_of_any_size_are_tried_before_they_are_trusted(partial: float) -> None:
    factors = [1.0] * int(96 * partial / 2)
    rope = {**LONGROPE, "short_factor": factors, "long_factor": factors, "partial_rotary_factor": partial}
    sizes = {**SIZES, "hidden_size": 96 * 4}
    check_family(family_of(Phi3Config(**sizes, rope_parameters=rope, original_max_position_embeddings=ORIGINAL)))
