"""GGUF files of mixtures of experts: written from tiny models of transformers, under the names of llama.cpp."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from swarmnode.compute.gguf.gguf import GgufCheckpoint
from swarmnode.compute.gguf.mixtures import REFUSED
from swarmnode.compute.model.assemble import check_tensors
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.packing.ggml import library
from swarmnode.errors import CheckpointError
from tests.compute.model.llama_gguf import WORDS, logits_in_parts

needs_ggml = pytest.mark.skipif(
    library() is None, reason="the package xllamacpp is not installed, or not for this machine"
)
pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS, EXPERTS, ACTIVE, HIDDEN, INNER, HEADS = 3, 6, 2, 64, 32, 4
SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    "vocab_size": len(WORDS),
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": ACTIVE,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LATENT: dict[str, Any] = {"head_dim": 32, "num_key_value_heads": HEADS, "kv_lora_rank": 32, "qk_rope_head_dim": 32}
LATENT |= {"qk_nope_head_dim": 64, "v_head_dim": 32, "first_k_dense_replace": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
YARN |= {"mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen2": ("qwen2_moe", "qwen2moe", {"shared_expert_intermediate_size": 64, "head_dim": HIDDEN // HEADS}),
    "MiniMax-M2": ("minimax_m2", "minimax-m2", {"intermediate_size": INNER, "rotary_dim": 16}),
    "GLM 4.5": ("glm4_moe", "glm4moe", {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5}),
    "GLM 4.5 Air": ("glm4_moe", "glm4moe", {"attention_bias": True, "use_qk_norm": True, "n_shared_experts": 2}),
    "DeepSeek V2 Lite": ("deepseek_v2", "deepseek2", {**LATENT, "q_lora_rank": None, "rope_parameters": YARN}),
    "DeepSeek V2": (
        *("deepseek_v2", "deepseek2"),
        {**LATENT, "q_lora_rank": 32, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
    ),
    "DeepSeek V3": (
        *("deepseek_v3", "deepseek2"),
        {**LATENT, "q_lora_rank": 32, "n_group": 2, "topk_group": 1, "rope_parameters": {**YARN, "mscale": 1.0}},
    ),
}
FAMILIES["DeepSeek V3"][2]["rope_parameters"]["mscale_all_dim"] = 1.0


def write_keys(writer: Any, config: Any, *, splits: bool) -> None:
    """The keys that llama.cpp's converter writes for a family."""
    is_latent = config.model_type.startswith("deepseek")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(LAYERS + (1 if config.model_type == "glm4_moe" else 0))
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(ACTIVE)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "qwen2_moe":
        writer.add_head_count_kv(2)
        writer.add_expert_feed_forward_length(INNER)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        return
    writer.add_expert_feed_forward_length(INNER)
    writer.add_expert_gating_func(_gating("SOFTMAX" if config.model_type == "deepseek_v2" else "SIGMOID"))
    if config.model_type == "minimax_m2":
        writer.add_head_count_kv(2)
        writer.add_key_length(32)
        writer.add_value_length(32)
        writer.add_rope_dimension_count(16)
        return
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group or 1)
    writer.add_expert_group_used_count(config.topk_group or 1)
    writer.add_expert_weights_norm(config.model_type != "deepseek_v2")
    if not is_latent:
        writer.add_head_count_kv(2)
        writer.add_key_length(32)
        writer.add_value_length(32)
        writer.add_rope_dimension_count(int(32 * config.rope_parameters["partial_rotary_factor"]))
        writer.add_nextn_predict_layers(1)
        return
    whole, rank = config.qk_nope_head_dim + config.qk_rope_head_dim, config.kv_lora_rank
    if splits:
        writer.add_key_length(rank + config.qk_rope_head_dim)
        writer.add_value_length(rank)
        writer.add_key_length_mla(whole)
        writer.add_value_length_mla(config.v_head_dim)
    else:
        writer.add_key_length(whole)
        writer.add_value_length(config.v_head_dim)
    writer.add_head_count_kv(1 if splits else HEADS)
    writer.add_kv_lora_rank(rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if "factor" in config.rope_parameters:
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def _gating(name: str) -> Any:
    import gguf

    return getattr(gguf.ExpertGatingFuncType, name)


def save_gguf(
    path: Path, family: str, *, splits: bool = False, without: str = "", say: Callable[[Any], None] = lambda _: None
) -> Any:
    """Write a tiny model's GGUF file with matrices in Q8_0, and return the model with what these hold.

    `splits`: the two parts of a latent attention's kv_b are apart, as in newer files. `without`: a tensor that the file lacks.
    """
    import gguf

    model_type, architecture, more = FAMILIES[family]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**SIZES, **more})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, LAYERS)
    writer = gguf.GGUFWriter(path, architecture)
    write_keys(writer, config, splits=splits)
    say(writer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(WORDS)
    writer.add_token_types([1] * len(WORDS))
    writer.add_token_merges(["t h"])
    kind = gguf.GGMLQuantizationType.Q8_0

    def add(name: str, values: Tensor) -> Tensor:
        """Add a tensor and return the values that it holds."""
        if name == without:
            return values
        if values.ndim < 2 or values.shape[-1] % 32 or "gate_inp" in name:
            writer.add_tensor(name, values.float().contiguous().numpy())
            return values
        packed = gguf.quantize(values.contiguous().numpy(), kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        return torch.from_numpy(gguf.dequantize(packed, kind)).view(values.shape)

    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name not in model.state_dict():
                continue
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            tensor.add_(torch.randn(tensor.shape, generator=draw).bfloat16().float() * 0.125)
            layer = (re.search(r"\.(\d+)\.", name) or " 0")[1]
            if name.endswith("gate_up_proj"):
                halves = zip(("gate", "up"), tensor.chunk(2, 1), strict=True)
                tensor.copy_(
                    torch.cat([add(f"blk.{layer}.ffn_{kind_}_exps.weight", half) for kind_, half in halves], 1)
                )
            elif name.endswith("e_score_correction_bias"):
                add(f"blk.{layer}.exp_probs_b.bias", tensor)
            elif splits and name.endswith("kv_b_proj.weight"):
                keys = config.qk_nope_head_dim
                heads_HRL = tensor.view(HEADS, keys + config.v_head_dim, -1)
                heads_HRL[:, :keys] = add(f"blk.{layer}.attn_k_b.weight", heads_HRL[:, :keys].mT).mT
                heads_HRL[:, keys:] = add(f"blk.{layer}.attn_v_b.weight", heads_HRL[:, keys:])
            elif name.endswith("shared_expert_gate.weight"):
                add(f"blk.{layer}.ffn_gate_inp_shexp.weight", tensor[0])
            else:
                told = names.get_name(name, try_suffixes=(".weight", ".bias")) or ""
                told += ".weight" if name.endswith("down_proj") else ""
                assert told, name
                tensor.copy_(add(told, tensor))
    if model_type == "glm4_moe":  # a layer that only guesses tokens
        add(f"blk.{LAYERS}.nextn.eh_proj.weight", torch.randn(HIDDEN, 2 * HIDDEN))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@needs_ggml
@pytest.mark.parametrize(
    ("family", "splits"), [*((family, False) for family in FAMILIES), ("DeepSeek V2", True), ("DeepSeek V3", True)]
)
@torch.inference_mode()
def test_a_file_gives_the_model_it_was_made_of(family: str, splits: bool, tmp_path: Path) -> None:
    with torch.inference_mode(mode=False):
        model = save_gguf(tmp_path / "model.gguf", family, splits=splits)
    (out := tmp_path / "packed").mkdir()
    GgufCheckpoint(tmp_path / "model.gguf").pack(out)
    checkpoint = Checkpoint(out)
    check_tensors(checkpoint)
    experts = [name for name, entry in checkpoint.entries.items() if ".experts." in name and entry.dtype == "Q8_0"]
    assert len(experts) == 3 * (LAYERS - getattr(model.config, "first_k_dense_replace", 0)), "experts stay packed"
    ids = torch.randint(0, len(WORDS), (1, 14))
    expected = model(ids, use_cache=False).logits
    for products in ("plain", "exact"):
        found = logits_in_parts(checkpoint, 2, ids, products)
        assert float((found - expected).abs().max() / expected.std()) < 1e-4, products


@pytest.mark.parametrize(
    ("part", "reason"), [("k", "no finite numbers"), ("v", "no finite numbers"), ("kv", "lacks 1 tensors .*kv_b_proj")]
)
def test_a_latent_attention_without_a_part_is_refused(part: str, reason: str, tmp_path: Path) -> None:
    save_gguf(tmp_path / "model.gguf", "DeepSeek V3", splits=part != "kv", without=f"blk.1.attn_{part}_b.weight")
    (out := tmp_path / "packed").mkdir()
    with pytest.raises(CheckpointError, match=reason):
        GgufCheckpoint(tmp_path / "model.gguf").pack(out)


CONTRADICTIONS: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "scores": ("GLM 4.5", lambda writer: writer.add_expert_gating_func(_gating("SOFTMAX")), "gating_func is 1"),
    "sums": ("DeepSeek V2", lambda writer: writer.add_expert_weights_norm(True), "weights_norm is true beside softmax"),
    "sizes": ("DeepSeek V3", lambda writer: writer.add_rope_dimension_count(96), "sizes of its latent attention"),
    "yarn": (
        "DeepSeek V3",
        lambda writer: writer.add_rope_scaling_yarn_log_mul(0.0),
        "without its rope.scaling.yarn_log",
    ),
    "experts": ("GLM 4.5", lambda writer: writer.add_expert_count(EXPERTS + 1), "is of shape|lacks"),
    "heads": ("DeepSeek V3", lambda writer: writer.add_head_count(0), "num_attention_heads"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_is_not_read_or_contradicts_itself_is_refused(case: str, tmp_path: Path) -> None:
    family, say, reason = CONTRADICTIONS[case]
    save_gguf(tmp_path / "model.gguf", family, say=say)
    (out := tmp_path / "packed").mkdir()
    with pytest.raises(CheckpointError, match=reason):
        GgufCheckpoint(tmp_path / "model.gguf").pack(out)


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_mixture_that_is_not_read_is_refused_with_the_reason(architecture: str, tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    told = f"architecture {architecture} is none that is read from GGUF files: {REFUSED[architecture]}; use the model's"
    with pytest.raises(CheckpointError, match=re.escape(told)):
        GgufCheckpoint(tmp_path / "model.gguf")
