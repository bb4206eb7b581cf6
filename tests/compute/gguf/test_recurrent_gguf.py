"""GGUF files of families with recurrent states: written from tiny models of transformers, under the names of llama.cpp."""

from __future__ import annotations

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
from swarmnode.compute.model.assemble import check_tensors
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.packing.ggml import library
from swarmnode.errors import CheckpointError
from tests.compute.model.llama_gguf import WORDS, logits_in_parts
from tests.numerics.families import COMMON, RECURRENT

SIZES = {"vocab_size": len(WORDS), "hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
needs_ggml = pytest.mark.skipif(
    library() is None, reason="the package xllamacpp is not installed, or not for this machine"
)
pytestmark = pytest.mark.filterwarnings("ignore")


def keys_of_lfm2(writer: Any, config: Any) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([2 if kind == "full_attention" else 0 for kind in config.layer_types])
    writer.add_rope_freq_base(1e6)
    writer.add_shortconv_l_cache(config.conv_L_cache)


def keys_of_mamba(writer: Any, config: Any) -> None:
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.time_step_rank)


KEYS: dict[str, Callable[[Any, Any], None]] = {"lfm2": keys_of_lfm2, "mamba": keys_of_mamba}


def as_in_files(name: str, tensor: Tensor) -> Tensor:
    """A tensor as llama.cpp's converter writes it."""
    if "conv" in name and tensor.ndim == 3:
        return tensor[:, 0]
    return -torch.exp(tensor) if name.endswith("A_log") else tensor


def save_gguf(path: Path, family: str) -> Any:
    """Write a tiny model's GGUF file with matrices in Q8_0, and return the model with what these hold."""
    import gguf

    sizes = {**COMMON, **RECURRENT[family], **SIZES, "intermediate_size": 128}
    if family == "mamba":
        sizes["time_step_rank"] = 32
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    KEYS[family](writer, config)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(WORDS)
    writer.add_token_types([1] * len(WORDS))
    writer.add_token_merges(["t h"])
    kind = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.add_(torch.randn(parameter.shape, generator=draw).bfloat16().float() * 0.125)
            told = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert told is not None, name
            values = as_in_files(name, parameter.detach()).contiguous().numpy()
            if values.ndim == 2 and values.shape[1] % 32 == 0 and "conv" not in name and "A_log" not in name:
                packed = gguf.quantize(values, kind)
                writer.add_tensor(told, packed, raw_dtype=kind)
                parameter.copy_(torch.from_numpy(gguf.dequantize(packed, kind)).view(parameter.shape))
            else:
                writer.add_tensor(told, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@needs_ggml
@pytest.mark.parametrize("family", KEYS)
@torch.inference_mode()
def test_a_file_gives_the_model_it_was_made_of(family: str, tmp_path: Path) -> None:
    with torch.inference_mode(mode=False):
        model = save_gguf(tmp_path / "model.gguf", family)
    (out := tmp_path / "packed").mkdir()
    GgufCheckpoint(tmp_path / "model.gguf").pack(out)
    checkpoint = Checkpoint(out)
    check_tensors(checkpoint)
    ids = torch.randint(0, len(WORDS), (1, 14))
    expected = model(ids, use_cache=False).logits
    for products in ("plain", "exact"):
        found = logits_in_parts(checkpoint, 3, ids, products)
        assert float((found - expected).abs().max() / expected.std()) < 1e-4, products


@pytest.mark.parametrize(
    "architecture", ["falcon-h1", "granitehybrid", "nemotron_h", "jamba", "qwen3next", "mamba2", "plamo2"]
)
def test_an_architecture_that_is_not_read_is_named(architecture: str, tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_block_count(2)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=f"architecture {architecture} is none .* use the model's safetensors"):
        GgufCheckpoint(tmp_path / "model.gguf")
