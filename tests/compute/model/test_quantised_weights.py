"""Quantised checkpoints that stay packed: the same model as with dequantised weights, in the bytes that are counted for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarmnode.compute.capacity.capacity import unit_sizes
from swarmnode.compute.model.assemble import check_tensors
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.ggml import FORMATS, dequantise, library
from swarmnode.compute.packing.methods import method_of
from swarmnode.compute.packing.packed_matrix import PackedMatrix
from swarmnode.compute.packing.packed_weight import PackedStack, PackedWeight, held_by
from swarmnode.compute.packing.quantised_matrix import WHOLE_NUMBERS, mxfp4_rows
from swarmnode.compute.serving.loading import load_span
from swarmnode.errors import CheckpointError
from tests.compute.packing.test_dequantize import METHODS, quantise, save
from tests.llama import save_llama

needs_ggml = pytest.mark.skipif(
    library() is None, reason="the package xllamacpp is not installed, or not for this machine"
)
CLOSE = 1e-4  # of the logits' spread
KINDS = {  # classes of the matrices, and the formats that hold them without loss
    **dict.fromkeys(("gptq-4", "gptq-v2", "gptq-dynamic", "awq", "w4a16-zeros"), "GgmlMatrix Q5_0"),
    **dict.fromkeys(("gptq-symmetric", "gptq-symmetric-as-it-is", "gptq-3", "w4a16"), "GgmlMatrix Q4_0"),
    **dict.fromkeys(("gptq-8-symmetric", "w8a16"), "GgmlMatrix Q8_0"),
    **dict.fromkeys(("int8", "w8a8"), "ScaledMatrix Q8_0"),
    "gptq-ordered": "OrderedMatrix Q5_0",
    "w4a16-ordered": "OrderedMatrix Q4_0",
    **dict.fromkeys(("fp8", "fp8-rows", "fp8-blocks"), "TiledMatrix Fp8"),
    **dict.fromkeys(("nf4", "nf4-nested"), "TiledMatrix FourBit"),
    **dict.fromkeys(("gptq-2", "gptq-2-symmetric", "gptq-8"), "TiledMatrix Gptq"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder, layers=2)
    return folder


def logits(span: ModelSpan, ids_BT: Tensor) -> Tensor:
    with torch.inference_mode():
        return span.forward(ids_BT, cache=None, position_ids=torch.arange(ids_BT.shape[1])[None])


def in_float32(plain: dict[str, Tensor], folder: Path, original: Path) -> Checkpoint:
    tensors = {name: tensor.float().contiguous() for name, tensor in plain.items()}
    save(folder, tensors, json.loads((original / "config.json").read_text()))
    return Checkpoint(folder)


def check_products(checkpoint: Checkpoint, plain: Checkpoint) -> ModelSpan:
    """Compare the logits of a packed model with those of the plain one; returns the packed one."""
    check_tensors(checkpoint)
    ids_BT, units = torch.arange(40)[None], checkpoint.units
    reference_BTV = logits(load_span(plain, 0, units, dtype=torch.float32, check=False), ids_BT)
    spread = float(reference_BTV.std())
    for products in ("plain", "exact"):
        span = load_span(checkpoint, 0, units, dtype=torch.float32, products=products, check=False)
        assert float((logits(span, ids_BT) - reference_BTV).abs().max()) < CLOSE * spread
        few_BTV = torch.cat([logits(span, ids_BT[:, :length])[:, -1:] for length in range(1, 4)], dim=1)
        assert float((few_BTV - reference_BTV[:, :3]).abs().max()) < CLOSE * spread
    x = ids_BT
    for cut in ((0, 2), (2, units)):
        part = load_span(checkpoint, *cut, dtype=torch.float32, products="exact", check=False)
        with torch.inference_mode():
            x = part.forward(x, cache=None, position_ids=torch.arange(40)[None])
    assert float((x - reference_BTV).abs().max()) < CLOSE * spread
    return span


def matrices(span: ModelSpan) -> list[Any]:
    weights = [weight for held in held_by(span.model) for weight in (held if isinstance(held, PackedStack) else [held])]
    return [part for weight in weights for part in weight._parts]


@needs_ggml
@pytest.mark.parametrize("method", METHODS)
def test_a_packed_model_is_the_plain_one(llama: Path, tmp_path: Path, method: str) -> None:
    expected = quantise(llama, tmp_path / "quantised", method)
    checkpoint = Checkpoint(tmp_path / "quantised")
    assert checkpoint.is_packed and checkpoint.quantised is not None
    span = check_products(checkpoint, in_float32(expected, tmp_path / "plain", llama))
    found = matrices(span)
    assert len(found) == 14 and {f"{type(part).__name__} {part.name}" for part in found} == {KINDS[method]}
    counted = sum(unit_sizes(checkpoint, dtype=torch.float32, keeps_packed=True).weight_bytes)
    orders = 4 * sum(part.inputs for part in found)
    assert 0.95 * counted - orders < span.weight_bytes < counted + orders + 1024


SCALES = (".scales", ".weight_scale", ".weight_scale_inv", ".SCB", ".weight.absmax")


@needs_ggml
@pytest.mark.parametrize("method", ["gptq-4", "gptq-ordered", "awq", "w4a16", "w8a8", "int8", "fp8", "fp8-rows", "nf4"])
@pytest.mark.parametrize("products", ["exact", None])
def test_a_node_refuses_scales_that_are_not_finite(
    llama: Path, tmp_path: Path, method: str, products: str | None
) -> None:
    quantise(llama, tmp_path, method)
    tensors = load_file(tmp_path / "model.safetensors")
    suffix = next(each for each in SCALES if f"model.layers.0.mlp.up_proj{each}" in tensors)
    tensors[f"model.layers.0.mlp.up_proj{suffix}"].view(-1)[-1] = torch.nan if products else torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.*no finite numbers"):
        load_span(Checkpoint(tmp_path), 1, 2, dtype=torch.float32, products=products, check=False)


@needs_ggml
def test_rows_are_those_of_the_plain_matrix(llama: Path, tmp_path: Path) -> None:
    for method in ("gptq-ordered", "int8", "fp8", "nf4-nested"):
        expected = quantise(llama, tmp_path / method, method)["model.layers.0.mlp.down_proj.weight"].float()
        span = load_span(Checkpoint(tmp_path / method), 1, 2, dtype=torch.float32, products="exact", check=False)
        weight = next(held for held in held_by(span.model) if held.shape == expected.shape)
        assert isinstance(weight, PackedWeight)
        ids = torch.tensor([63, 0, 31, 32])
        torch.testing.assert_close(weight.rows(ids), expected[ids], rtol=1e-6, atol=1e-7)


@needs_ggml
@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_keep_their_two_bytes(tmp_path: Path, tied: bool) -> None:
    save_llama(tmp_path / "llama", layers=2, tie_word_embeddings=tied)
    expected = quantise(tmp_path / "llama", tmp_path / "quantised", "w4a16")
    file = tmp_path / "quantised" / "model.safetensors"
    tensors = load_file(file)
    ends = [name for name in tensors if name in ("model.embed_tokens.weight", "lm_head.weight")]
    assert len(ends) == 2 - tied
    for name in ends:
        expected[name] = tensors[name] = tensors[name].bfloat16()
    save_file(tensors, file)
    checkpoint = Checkpoint(tmp_path / "quantised")
    span = check_products(checkpoint, in_float32(expected, tmp_path / "plain", tmp_path / "llama"))
    assert [part.name for part in matrices(span)].count("BF16") == len(ends)
    counted = sum(unit_sizes(checkpoint, dtype=torch.float32, keeps_packed=True).weight_bytes)
    assert span.weight_bytes < counted + 1024


@needs_ggml
@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_experts_are_joined_as_the_model_has_them(tmp_path: Path, method: str) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=11, num_experts_per_tok=2, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "mixtral")
    name = "gptq-symmetric" if method == "gptq" else method
    packing, settings = METHODS[name]
    quantised: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "mixtral" / "model.safetensors").items():
        if not any(f".w{number}." in name for number in (1, 2, 3)):
            quantised[name] = plain[name] = tensor
            continue
        parts, plain[name] = packing(tensor)
        quantised |= {name.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in parts.items()}
    described = json.loads((tmp_path / "mixtral" / "config.json").read_text())
    save(tmp_path / "quantised", quantised, described | {"quantization_config": settings})
    span = check_products(
        Checkpoint(tmp_path / "quantised"), in_float32(plain, tmp_path / "plain", tmp_path / "mixtral")
    )
    stacks = list(held_by(span.model))
    assert [tuple(stack.shape) for stack in stacks] == [(11, 192, 64), (11, 64, 96)]


@needs_ggml
def test_gpt_oss_keeps_its_experts_in_mxfp4(tmp_path: Path) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = GptOssConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=2, pad_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    GptOssForCausalLM(config).save_pretrained(tmp_path / "gpt-oss")
    quantised: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "gpt-oss" / "model.safetensors").items():
        quantised[name] = plain[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            del quantised[name]
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
            quantised |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert plain[name].shape == tensor.shape
    described = json.loads((tmp_path / "gpt-oss" / "config.json").read_text())
    save(tmp_path / "quantised", quantised, described | {"quantization_config": {"quant_method": "mxfp4"}})
    checkpoint = Checkpoint(tmp_path / "quantised")
    span = check_products(checkpoint, in_float32(plain, tmp_path / "plain", tmp_path / "gpt-oss"))
    found = matrices(span)
    assert len(found) == 2 * 2 * 6 and {part.name for part in found} == {"MXFP4"}
    stored = sum(entry.nbytes for name, entry in checkpoint.entries.items() if name.endswith(("_blocks", "_scales")))
    assert sum(part.nbytes for part in found) == stored


def test_formats_of_gguf_hold_whole_numbers_without_loss() -> None:
    random = torch.Generator().manual_seed(5)
    scales_OB = torch.rand(6, 4, generator=random).half() - 0.5
    for form in WHOLE_NUMBERS:
        integers_OI = torch.randint(form.smallest, form.largest + 1, (6, 128), generator=random).short()
        assert form.holds(integers_OI) and not form.holds(integers_OI * 0 + form.largest + 1)
        rows_OB = form.rows(integers_OI, scales_OB)
        expected_OI = integers_OI * scales_OB.float().repeat_interleave(32, dim=1)
        assert torch.equal(dequantise(rows_OB.reshape(-1), FORMATS[form.name], 768).view(6, 128), expected_OI)
    blocks = torch.randint(256, (6, 4, 16), dtype=torch.uint8, generator=random)
    exponents = torch.randint(0, 255, (6, 4), dtype=torch.uint8, generator=random)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack([blocks & 0xF, blocks >> 4], -1).flatten(-2).int()
    expected = values[codes].double() * 2.0 ** (exponents.double() - 127)[..., None]
    rows = mxfp4_rows(blocks, exponents)
    assert torch.equal(dequantise(rows.reshape(-1), FORMATS["MXFP4"], 768).view(6, 4, 32), expected.float())


@needs_ggml
def test_scales_that_float16_cannot_hold_stay_as_they_are(llama: Path, tmp_path: Path) -> None:
    """Groups with such scales are dequantised in tiles; one scale for each row is multiplied afterwards."""
    quantise(llama, tmp_path / "quantised", "gptq-symmetric")
    file = tmp_path / "quantised" / "model.safetensors"
    tensors = load_file(file)
    tensors |= {name: (scales.float() * 1.01) for name, scales in tensors.items() if name.endswith(".scales")}
    save_file(tensors, file)
    checkpoint = Checkpoint(tmp_path / "quantised")
    quantised = checkpoint.quantised
    assert quantised is not None
    span = load_span(checkpoint, 0, 4, dtype=torch.float32, products="exact", check=False)
    assert {type(part).__name__ for part in matrices(span)} == {"TiledMatrix"}
    plain = load_span(checkpoint, 0, 4, dtype=torch.float32, check=False)
    ids_BT = torch.arange(20)[None]
    assert torch.allclose(logits(span, ids_BT), logits(plain, ids_BT), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_all_float8_numbers_are_read(dtype: torch.dtype) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(dtype).view(4, 64)
    packed = torch.where(packed.float().isfinite(), packed.view(torch.uint8), 0).view(dtype)
    scales = torch.tensor([[1.0], [0.37], [256.0], [3e-5]])
    matrix = PackedMatrix("weight", packed, {"_scale": scales}, {})
    values = method_of({"quant_method": "fp8"}).dequantize(matrix)
    assert torch.equal(values, packed.float() * scales)
