"""Weights that stay packed: the same model as with dequantised ones, and products that depend on no other row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from swarmnode.compute.gguf.gguf import GgufCheckpoint, find_gguf
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.ggml import F32, FORMATS, check_finite, dequantise, library
from swarmnode.compute.packing.ggml_matrix import GgmlMatrix
from swarmnode.compute.packing.packed_weight import held_by
from swarmnode.compute.packing.tensor_entry import in_transformers_order
from swarmnode.compute.serving.loading import load_span
from swarmnode.errors import CheckpointError
from swarmnode.swarm.storage.content import PACKED_NAME
from tests.compute.model.llama_gguf import save_llama_gguf, save_moe_gguf

needs_ggml = pytest.mark.skipif(
    library() is None, reason="the package xllamacpp is not installed, or not for this machine"
)
ROUNDED = 0.05  # of an output's spread: activations have 8 bits
EXACT = 2e-6  # as far off as float32 products are


def pack(file: Path, out: Path) -> Checkpoint:
    out.mkdir()
    GgufCheckpoint(file).pack(out)
    return Checkpoint(out)


def logits(span: ModelSpan, ids_BT: Tensor) -> Tensor:
    with torch.inference_mode():
        return span.forward(ids_BT, cache=None, position_ids=torch.arange(ids_BT.shape[1])[None])


def dequantised(file: Path, checkpoint: Checkpoint) -> Any:
    """Return transformers' own model of the file, with weights dequantised to float32."""
    auto: Any = AutoModelForCausalLM
    read: Any = load_gguf_checkpoint
    model = auto.from_config(checkpoint.config, dtype=torch.float32)
    model.load_state_dict(read(str(file), return_tensors=True, model_to_load=model)["tensors"])
    return model.eval()


def transformers_logits(file: Path, checkpoint: Checkpoint, ids_BT: Tensor) -> Tensor:
    """Return the logits of transformers' own model of the file, with weights dequantised to float32."""
    with torch.inference_mode():
        found: Tensor = dequantised(file, checkpoint)(ids_BT).logits
    return found


def packed_rows(form: str, values_OI: Tensor) -> Tensor:
    """Return the rows in a format. Skips the test if gguf cannot write it."""
    try:
        return torch.from_numpy(gguf.quantize(values_OI.numpy(), gguf.GGMLQuantizationType[form]).view(np.uint8))
    except NotImplementedError:
        pytest.skip(f"gguf cannot write {form}")


@needs_ggml
@pytest.mark.parametrize("form", [name for name in FORMATS if name != F32])
@pytest.mark.parametrize("outputs", [64, 37])
def test_products_are_the_dequantised_ones_and_depend_on_no_other_row(form: str, outputs: int) -> None:
    random = torch.Generator().manual_seed(3)
    kind, inputs = FORMATS[form], 512
    rows_OB = torch.randint(0, 256, (outputs, kind.row_bytes(inputs)), dtype=torch.uint8, generator=random)
    values_OI = dequantise(rows_OB.view(-1), kind, outputs * inputs).view(outputs, inputs)
    good_OB = rows_OB[values_OI.abs().amax(dim=1) < 1e4]  # random scales may be huge, or NaN
    if len(good_OB) < 4:
        good_OB = packed_rows(form, torch.randn(outputs, inputs, generator=random))
    values_OI = dequantise(good_OB.reshape(-1), kind, len(good_OB) * inputs).view(-1, inputs)
    expected = gguf.dequantize(good_OB.numpy(), gguf.GGMLQuantizationType[form])
    assert torch.equal(values_OI, torch.from_numpy(np.copy(expected)).view_as(values_OI))
    x_RI = torch.randn(70, inputs, generator=random)
    exact = GgmlMatrix(good_OB, kind, inputs, exact=True)
    largest = float((x_RI.double() @ values_OI.t().double()).abs().max())
    for few in (1, 3, 8, 9, 70):
        y_RO = torch.cat([exact.multiply(part.contiguous()) for part in x_RI.split(few)])
        assert float((y_RO.double() - x_RI.double() @ values_OI.t().double()).abs().max()) < EXACT * largest
    matrix = GgmlMatrix(good_OB, kind, inputs)
    together_RO, exact_RO = matrix.multiply(x_RI), x_RI @ values_OI.t()
    scale_O = exact_RO.std(dim=0).clamp(min=1e-9)
    assert ((together_RO - exact_RO).abs() / scale_O).median() < ROUNDED
    for few in (1, 3, 8):
        alone_RO = torch.cat([matrix.multiply(part.contiguous()) for part in x_RI.split(few)])
        assert torch.equal(alone_RO, together_RO)


def test_a_rotary_projection_is_turned_as_transformers_does() -> None:
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    rows = np.arange(48 * 5).reshape(48, 5)
    make: Any = LlamaTensorProcessor
    for heads in (2, 4, 6):
        expected = make()._reverse_permute_weights(rows, heads, heads)
        assert torch.equal(in_transformers_order(torch.from_numpy(rows), heads), torch.from_numpy(np.copy(expected)))


@needs_ggml
@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "F16"])
@pytest.mark.parametrize("save", [save_llama_gguf, save_moe_gguf])
def test_a_packed_model_is_the_plain_one(save: Any, form: str, tmp_path: Path) -> None:
    save(tmp_path / "tiny.gguf", form=form)
    checkpoint = pack(tmp_path / "tiny.gguf", tmp_path / "packed")
    assert checkpoint.is_packed
    packed_bytes = sum(entry.nbytes for entry in checkpoint.entries.values() if entry.is_packed)
    exact = load_span(checkpoint, 0, checkpoint.units, dtype=torch.float32, check=False)
    ids_BT = torch.arange(24)[None]
    reference_BTV = transformers_logits(tmp_path / "tiny.gguf", checkpoint, ids_BT)
    spread = float(reference_BTV.std())
    assert float((logits(exact, ids_BT) - reference_BTV).abs().max()) < 1e-4 * spread
    packed = load_span(checkpoint, 0, checkpoint.units, dtype=torch.float32, products="exact", check=False)
    with_few_BTV = torch.cat([logits(packed, ids_BT[:, :length])[:, -1:] for length in range(1, 9)], dim=1)
    assert float((with_few_BTV - reference_BTV[:, :8]).abs().max()) < 1e-4 * spread
    assert float((logits(packed, ids_BT) - reference_BTV).abs().max()) < 1e-4 * spread
    fast = load_span(checkpoint, 0, checkpoint.units, dtype=torch.float32, products="fast", check=False)
    assert sum(weight.nbytes for weight in held_by(fast.model)) == packed_bytes
    assert packed_bytes < fast.weight_bytes < packed_bytes + (1 << 16)
    assert float((logits(fast, ids_BT) - reference_BTV).abs().median()) < ROUNDED * spread  # a router may choose others
    parts = [
        load_span(checkpoint, *cut, dtype=torch.float32, products="fast", check=False)
        for cut in ((0, 1), (1, 3), (3, 4))
    ]
    x = ids_BT
    for part in parts:
        x = logits(part, x)
    assert torch.equal(x, logits(fast, ids_BT))


@needs_ggml
def test_a_model_of_several_files_is_one(tmp_path: Path) -> None:
    save_llama_gguf(tmp_path / "tiny.gguf")
    checkpoint = pack(tmp_path / "tiny.gguf", tmp_path / "whole")
    for number in (1, 2):
        part = tmp_path / f"tiny-0000{number}-of-00002.gguf"
        save_llama_gguf(part, only=lambda name, number=number: ("blk.1." in name) == (number == 2))  # type: ignore[misc]
    assert find_gguf(tmp_path / "tiny-00002-of-00002.gguf") == tmp_path / "tiny-00001-of-00002.gguf"
    split = pack(tmp_path / "tiny-00001-of-00002.gguf", tmp_path / "split")
    assert split.entries.keys() == checkpoint.entries.keys()
    ids_BT = torch.arange(9)[None]
    spans = [load_span(each, 0, 4, dtype=torch.float32, products="fast", check=False) for each in (checkpoint, split)]
    assert torch.equal(logits(spans[0], ids_BT), logits(spans[1], ids_BT))
    (tmp_path / "tiny-00002-of-00002.gguf").unlink()
    with pytest.raises(
        CheckpointError, match=r"tiny-00001-of-00002\.gguf is one part of 2, and tiny-00002.* is missing"
    ):
        find_gguf(tmp_path / "tiny-00001-of-00002.gguf")


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    save_llama_gguf(tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf", "r+")
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_up.weight")
    sound = np.copy(tensor.data[3, :2])

    def put(scale: Any) -> None:
        tensor.data[3, :2] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
        reader.data.flush()

    put(np.float16("nan"))
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight holds values that are no finite numbers"):
        pack(tmp_path / "tiny.gguf", tmp_path / "founder")
    put(sound)
    checkpoint = pack(tmp_path / "tiny.gguf", tmp_path / "packed")
    for scale in ("nan", "inf", "-inf"):  # of a founder that looks at nothing
        put(np.float16(scale))
        for products in ("fast", "exact", "plain"):
            told = r"model\.layers\.1\.mlp\.up_proj\.weight holds values that are no finite numbers"
            with pytest.raises(CheckpointError, match=told):
                load_span(checkpoint, 2, 3, products=products, check=False)
            assert load_span(checkpoint, 1, 2, products=products, check=False).start == 1  # another node's layer


@pytest.mark.parametrize("name", FORMATS)
def test_scales_tell_whether_a_blocks_values_are_finite(name: str) -> None:
    """Of random blocks, some of which have scales near the largest."""
    form, random = FORMATS[name], torch.Generator().manual_seed(2)
    blocks_NB = torch.randint(0, 256, (4000, form.block_bytes), dtype=torch.uint8, generator=random)
    for at in (0, *form.scales, *(at + 1 for at in form.scales)):
        blocks_NB[: len(blocks_NB) // 2, at] = torch.randint(
            247, 256, (len(blocks_NB) // 2,), dtype=torch.uint8, generator=random
        )
    expected_N = dequantise(blocks_NB.view(-1), form, len(blocks_NB) * form.block).isfinite().view(len(blocks_NB), -1)
    found = []
    for block_B in blocks_NB:
        try:
            check_finite(block_B, form, "x")
            found.append(True)
        except CheckpointError:
            found.append(False)
    assert found == expected_N.all(dim=1).tolist()
    assert 100 < sum(found) < len(found) - 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "Q9_9"}, "is damaged"),
        ({"format": "Q4_0"}, "contradicts itself"),
        ({"shape": [64, 33]}, "is damaged"),
        ({"shape": [64]}, "is damaged"),
        ({"begin": -34}, "is damaged"),
        ({"begin": "0"}, "is damaged"),
        ({"heads": 5}, "contradicts itself"),
        ({"file": "../weights.gguf"}, "contradicts itself"),
        ({"file": "model.safetensors"}, "contradicts itself"),
        ({"file": "other.gguf"}, "other.gguf: missing"),
    ],
)
def test_a_damaged_index_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_llama_gguf(tmp_path / "tiny.gguf")
    pack(tmp_path / "tiny.gguf", tmp_path / "packed")
    index = tmp_path / "packed" / PACKED_NAME
    values = json.loads(index.read_text())
    values["tensors"]["model.layers.0.self_attn.q_proj.weight"] |= change
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path / "packed")


@needs_ggml
@pytest.mark.parametrize("name", ["mlp.gate_proj", "mlp.experts.down_proj"])
def test_a_shape_that_is_not_the_models_is_refused_before_any_product(name: str, tmp_path: Path) -> None:
    """With as many bytes: ggml would read beyond the activations."""
    save = save_moe_gguf if "experts" in name else save_llama_gguf
    save(tmp_path / "tiny.gguf")
    pack(tmp_path / "tiny.gguf", tmp_path / "packed")
    index = tmp_path / "packed" / PACKED_NAME
    values = json.loads(index.read_text())
    (entry,) = [entry for key, entry in values["tensors"].items() if key.startswith(f"model.layers.0.{name}")]
    entry["shape"][-2:] = reversed(entry["shape"][-2:])
    index.write_text(json.dumps(values))
    for products in ("fast", "exact", "plain"):
        with pytest.raises(CheckpointError, match=r"shape|misshapen"):
            load_span(Checkpoint(tmp_path / "packed"), 0, 4, dtype=torch.float32, products=products, check=False)
    matrix = GgmlMatrix(torch.zeros(64, 34, dtype=torch.uint8), FORMATS["Q8_0"], 32)
    with pytest.raises(ValueError, match="width 32"):
        matrix.multiply(torch.zeros(1, 31))


@pytest.mark.parametrize("change", [{"shape": [6, 64, 128]}, {"shape": [3, 256, 64]}])
def test_parts_that_do_not_fit_together_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    """With as many bytes: of another width ggml would read beyond them."""
    save_moe_gguf(tmp_path / "tiny.gguf")
    pack(tmp_path / "tiny.gguf", tmp_path / "packed")
    index = tmp_path / "packed" / PACKED_NAME
    values = json.loads(index.read_text())
    entry = values["tensors"]["model.layers.0.mlp.experts.gate_up_proj/1"]
    assert entry["shape"] == [6, 128, 64]
    index.write_text(
        json.dumps({"tensors": values["tensors"] | {"model.layers.0.mlp.experts.gate_up_proj/1": entry | change}})
    )
    with pytest.raises(CheckpointError, match="do not fit together"):
        Checkpoint(tmp_path / "packed")


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    save_llama_gguf(tmp_path / "tiny.gguf")
    checkpoint = pack(tmp_path / "tiny.gguf", tmp_path / "packed")
    with (tmp_path / "tiny.gguf").open("r+b") as file:
        file.truncate(20_000)
    with pytest.raises(CheckpointError, match=r"was cut short while it was read"):
        load_span(checkpoint, 0, 4, dtype=torch.float32, products="exact" if library() else "plain", check=False)
    with pytest.raises(CheckpointError, match=r"truncated"):
        Checkpoint(tmp_path / "packed")
