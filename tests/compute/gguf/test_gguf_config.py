"""What a GGUF file says and transformers' reader leaves at a family's defaults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swarmnode.compute.gguf.gguf_config import GgufHeader, complete_config
from swarmnode.errors import CheckpointError

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 257}


def header(architecture: str, said: dict[str, Any], *tensors: str) -> GgufHeader:
    fields = {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in said.items()}}
    contents = {key: SimpleNamespace(contents=lambda value=value: value) for key, value in fields.items()}
    small = [SimpleNamespace(name=name, data=[float(number)] * 8) for number, name in enumerate(tensors, 1)]
    return GgufHeader(SimpleNamespace(fields=contents, tensors=small))


@pytest.mark.parametrize(
    ("architecture", "model_type", "said", "expected"),
    [
        ("qwen3", "qwen3", {"attention.key_length": 32}, {"head_dim": 32}),
        ("qwen3moe", "qwen3_moe", {"expert_feed_forward_length": 32}, {"moe_intermediate_size": 32}),
        (
            *("qwen2moe", "qwen2_moe"),
            {"expert_shared_feed_forward_length": 48},
            {"shared_expert_intermediate_size": 48},
        ),
        ("phi3", "phi3", {}, {"pad_token_id": None}),  # 32,000 by default
        ("phi3", "phi3", {"rope.dimension_count": 12}, {"partial_rotary_factor": 0.75}),
        ("llama", "llama", {"rope.dimension_count": 16}, {"partial_rotary_factor": None}),
        ("qwen2", "qwen2", {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}, {"rope_scaling": None}),
        (
            *("gemma3", "gemma3_text"),
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "attention.key_length": 16},
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
        (
            *("qwen2", "qwen2"),
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        ),
        ("llama", "llama", {"rope.scaling.factor": 4.0}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("phi3", "phi3", {"attention.sliding_window": 32}, {"sliding_window": 32}),
        ("gemma2", "gemma2", {"attn_logit_softcapping": 20.0}, {"attn_logit_softcapping": 20.0}),
        ("gemma2", "gemma2", {"final_logit_softcapping": 10.0}, {"final_logit_softcapping": 10.0}),
        ("gemma2", "gemma2", {"attention.scale": 0.125}, {"query_pre_attn_scalar": 64}),
        ("starcoder2", "starcoder2", {"rope.freq_base": 999999.0}, {"rope_theta": 999999.0}),
        ("falcon", "falcon", {"attention.layer_norm_epsilon": 0.5}, {"layer_norm_epsilon": 0.5}),
        ("llama", "mistral", {}, {"sliding_window": None}),
        ("llama", "llama", {"attention.value_length": 16, "attention.causal": True, "logit_scale": 1.0}, {}),
    ],
)
def test_it_counts(architecture: str, model_type: str, said: dict[str, Any], expected: dict[str, Any]) -> None:
    values = complete_config(header(architecture, said), {"model_type": model_type, **SIZES})
    assert {name: values.get(name) for name in expected} == expected


def test_factors_of_long_and_short_texts() -> None:
    said = {"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.25, "context_length": 128}
    told = header("phi3", said, "rope_factors_long.weight", "rope_factors_short.weight")
    values = complete_config(told, {"model_type": "phi3", **SIZES})
    assert values["original_max_position_embeddings"] == 16
    assert values["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [1.0] * 8,
        "short_factor": [2.0] * 8,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.25,
    }


def test_a_head_of_its_own_is_not_tied_and_gpt2_has_its_length() -> None:
    read = {"model_type": "gpt2", "n_ctx": 128, "vocab_size": 257, "tie_word_embeddings": True}
    values = complete_config(header("gpt2", {}, "output.weight"), read)
    assert (values["tie_word_embeddings"], values["n_positions"]) == (False, 128)


def test_positions_scaled_in_another_way_are_refused() -> None:
    said = {"rope.scaling.type": "spiral", "rope.scaling.factor": 2.0}
    with pytest.raises(CheckpointError, match="scaled by spiral"):
        complete_config(header("llama", said), {"model_type": "llama", **SIZES})


def test_yarn_may_say_more_of_itself() -> None:
    said = {f"rope.scaling.{name}": value for name, value in (("type", "yarn"), ("factor", 4.0), ("attn_factor", 2.0))}
    said |= {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.original_context_length": 32}
    found = complete_config(header("qwen2", said), {"model_type": "qwen2", **SIZES})["rope_scaling"]
    assert found["beta_fast"] == 16.0 and found["attention_factor"] == pytest.approx(2 * 1.1386294)


def test_the_largest_gemma_divides_by_another_number() -> None:
    read = {"model_type": "gemma2", **SIZES, "hidden_size": 4608, "num_attention_heads": 32, "num_hidden_layers": 46}
    assert complete_config(header("gemma2", {}), read)["query_pre_attn_scalar"] == 144


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("llama", {"attention.sliding_window": 16}),
        ("llama", {"attention.value_length": 8}),
        ("llama", {"attention.scale": 1.0}),
        ("llama", {"expert_weights_scale": 2.5}),
        ("llama", {"rope.scaling.yarn_ext_factor": 0.5}),
        ("llama", {"rope.dimension_sections": [8, 12, 12, 0]}),
        ("gemma3", {"rope.freq_base_swa": 20000.0}),
        ("gpt2", {"rope.freq_base": 5000.0}),
    ],
)
def test_what_a_family_does_not_do_is_refused(architecture: str, said: dict[str, Any]) -> None:
    model_type = {"gemma3": "gemma3_text"}.get(architecture, architecture)
    with pytest.raises(
        CheckpointError, match=rf"its {architecture}\.{next(iter(said))} is .*, which is not supported here"
    ):
        complete_config(header(architecture, said), {"model_type": model_type, **SIZES, "max_position_embeddings": 128})
