"""`swarmnode quantize`: the formats that llama.cpp chooses, the values that ggml rounds to, and failures that leave nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from swarmnode.compute.gguf import repack
from swarmnode.compute.gguf.repack import GgufRepack
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import load_model
from swarmnode.compute.packing.ggml import library
from swarmnode.compute.packing.recipes import END, FORMATS, RECIPES, Matrix, choose, recipe_of
from swarmnode.config import EXACT, PLAIN
from swarmnode.errors import CheckpointError, LocalError, UsageError
from swarmnode.founding.model_source import from_model
from swarmnode.founding.quantisation import quantise_model
from tests.cli.command import assert_clear, invoke
from tests.compute.model.llama_gguf import save_llama_gguf, save_moe_gguf
from tests.llama import save_llama
from tests.trained import GEMMA3, trained

needs_ggml = pytest.mark.skipif(library() is None, reason="the package xllamacpp is not installed")
ASK_LLAMA_CPP = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.n_ctx = sys.argv[1], 1, 64
answer = xllamacpp.Server(params).handle_completions({"prompt": [5, 80, 3], "n_predict": 4, "ignore_eos": True})
assert answer["usage"]["completion_tokens"] == 4, answer
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with plain values."""
    path = tmp_path_factory.mktemp("wide") / "tiny-F32.gguf"
    save_llama_gguf(path, form="F32")
    return path


def read(file: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def test_a_gguf_file_keeps_all_but_its_matrices(wide: Path, tmp_path: Path) -> None:
    out, told = tmp_path / "tiny.gguf", list[int]()
    made = quantise_model(str(wide), out, "q8_0", progress=lambda done, total: told.append(done * 100 // total))
    before, after = read(wide), read(out)
    assert list(before) == list(after) and made.formats == {"Q8_0": 16} and told[-1] == 100
    for name, tensor in after.items():
        assert list(tensor.shape) == list(before[name].shape)
        if len(tensor.shape) == 1:
            assert tensor.tensor_type.name == "F32" and np.array_equal(tensor.data, before[name].data)
        else:
            assert np.array_equal(tensor.data, gguf.quantize(before[name].data, gguf.GGMLQuantizationType.Q8_0))
    keys = [gguf.GGUFReader(file).fields for file in (wide, out)]
    for key, field in keys[0].items():
        if not key.startswith(("GGUF.", "general.file_type")):
            assert keys[1][key].contents() == field.contents()
    assert keys[1]["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q8_0


@needs_ggml
def test_llama_cpp_loads_it(wide: Path, tmp_path: Path) -> None:
    quantise_model(str(wide), tmp_path / "tiny.gguf", "q4_0")
    subprocess.run(
        [sys.executable, "-c", ASK_LLAMA_CPP, tmp_path / "tiny.gguf"], check=True, capture_output=True, timeout=240
    )


@needs_ggml
@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_ggml_and_its_python_port_round_alike(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values_OI = torch.randn(7, 96, generator=torch.manual_seed(3))
    by_ggml = repack.quantise(values_OI, FORMATS[form], "w")
    monkeypatch.setattr(repack, "library", lambda: None)
    assert (repack.quantise(values_OI, FORMATS[form], "w") != by_ggml).float().mean() < 0.01  # ties


def test_without_ggml_other_formats_are_an_error_of_this_machine(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repack, "library", lambda: None)
    with pytest.raises(LocalError, match=r"IQ4_NL needs ggml, and the Python package xllamacpp is missing"):
        quantise_model(str(wide), tmp_path / "tiny.gguf", "iq4_nl")
    assert list(tmp_path.iterdir()) == []


def test_the_formats_are_those_that_llama_cpp_chose() -> None:
    file = trained(GEMMA3)
    source = GgufRepack(file, recipe_of("q4_k_m"), again=True)
    choice, made_by_llama_cpp = source.choice, {tensor.name: tensor.tensor_type.name for tensor in source._tensors}
    assert {name: form.name for name, form in choice.forms.items()} == {
        name: form for name, form in made_by_llama_cpp.items() if form != "F32"
    }
    assert any("Q5_0 instead of Q4_K" in notice for notice in choice.notices)


def test_formats_by_role() -> None:
    matrices = [Matrix("output.weight", (512, 256), END)]
    matrices += [
        Matrix(f"model.layers.{layer}.{name}.weight", (256, 256))
        for layer in range(16)
        for name in ("self_attn.v_proj", "self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
    ]
    forms = choose(recipe_of("Q3_K"), matrices, heads_per_key=4).forms
    of = lambda layer, name: forms[f"model.layers.{layer}.{name}.weight"].name  # noqa: E731
    assert [of(layer, "self_attn.v_proj") for layer in (0, 1, 2)] == ["Q5_K", "Q5_K", "Q4_K"]
    assert [of(layer, "mlp.down_proj") for layer in (0, 1)] == ["Q5_K", "Q4_K"]
    assert (of(5, "self_attn.o_proj"), of(5, "self_attn.q_proj"), forms["output.weight"].name) == (
        "Q4_K",
        "Q3_K",
        "Q6_K",
    )
    chosen = choose(recipe_of("q4_k_m"), matrices).forms
    six = [layer for layer in range(16) if chosen[f"model.layers.{layer}.mlp.down_proj.weight"].name == "Q6_K"]
    assert six == [0, 1, 4, 7, 10, 13, 14, 15]
    eight = choose(recipe_of("q4_0"), matrices, experts=8).forms
    assert eight["model.layers.3.self_attn.v_proj.weight"].name == "Q8_0"
    assert all(recipe.base in FORMATS for recipe in RECIPES.values())


@needs_ggml
def test_mxfp4_is_for_experts(tmp_path: Path) -> None:
    save_moe_gguf(tmp_path / "moe.gguf", form="F32")
    quantise_model(str(tmp_path / "moe.gguf"), tmp_path / "small.gguf", "mxfp4")
    forms = {name: tensor.tensor_type.name for name, tensor in read(tmp_path / "small.gguf").items()}
    assert {form for name, form in forms.items() if "_exps" in name} == {"MXFP4"}
    assert {form for name, form in forms.items() if "attn_q.w" in name or "token" in name} == {"Q8_0"}
    assert forms["blk.0.ffn_gate_inp.weight"] == "F32"


def test_a_folder_becomes_one_that_a_swarm_is_founded_on(tmp_path: Path) -> None:
    save_llama(tmp_path / "plain", layers=2)
    made = quantise_model(str(tmp_path / "plain"), tmp_path / "packed", "q8_0")
    packed = Checkpoint(tmp_path / "packed")
    assert packed.is_packed and made.formats == Counter({"Q8_0": 16})
    original = load_file(tmp_path / "plain" / "model.safetensors")
    found = packed.read(packed.tensor_names)
    assert found.keys() == original.keys()
    for name, values in original.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], values, rtol=0, atol=float(values.abs().max()) / 200)
        assert values.ndim > 1 or found[name].equal(values)
    source = from_model(str(tmp_path / "packed"), tmp_path / "swarm-weights", packs=True)
    assert source.folder == tmp_path / "packed" and source.model.units == 4
    assert {file.name for file in source.files} >= {"packed.json", "weights.gguf", "model.safetensors", "config.json"}


def test_experts_of_a_folder_are_packed_as_the_model_stacks_them(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3MoeConfig(
        vocab_size=256, num_hidden_layers=2, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2, **sizes
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "plain")  # each expert apart
    quantise_model(str(tmp_path / "plain"), tmp_path / "packed", "q8_0")
    packed = Checkpoint(tmp_path / "packed")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    wanted = model.state_dict()[name].float()
    assert packed.entries[name].is_packed
    torch.testing.assert_close(packed.read([name])[name], wanted, rtol=0, atol=float(wanted.abs().max()) / 200)
    assert packed.entries["model.layers.1.mlp.gate.weight"].dtype == "F32"
    from_model(str(tmp_path / "packed"), tmp_path / "swarm-weights", packs=True)


def test_rounding_twice_is_asked_for(tmp_path: Path) -> None:
    save_llama_gguf(tmp_path / "q8.gguf", form="Q8_0")
    with pytest.raises(UsageError, match=r"packed already \(Q8_0\).*--allow-requantize"):
        quantise_model(str(tmp_path / "q8.gguf"), tmp_path / "q4.gguf", "q4_0")
    quantise_model(str(tmp_path / "q8.gguf"), tmp_path / "q4.gguf", "q4_0", again=True)
    assert read(tmp_path / "q4.gguf")["blk.0.attn_q.weight"].tensor_type.name == "Q4_0"
    quantise_model(str(tmp_path / "q8.gguf"), tmp_path / "same.gguf", "q8_0")  # nothing is rounded


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (("nothing.gguf", "out.gguf"), 2, ["nothing.gguf", "no such"]),
        (("tiny.gguf", "out"), 2, ["out: of a GGUF file a GGUF file is made"]),
        (("llama", "out.gguf"), 2, ["a folder is made"]),
        (("tiny.gguf", "tiny.gguf", "--force"), 2, ["is the model itself"]),
        (("tiny.gguf", "there.gguf"), 2, ["there.gguf exists", "--force"]),
        (("llama", "there"), 2, ["there exists", "--force"]),
        (("tiny.gguf", "out.gguf", "--format", "q4km"), 2, ["did you mean q4_k_m?"]),
        (("tiny.gguf", "out.gguf", "--format", "zip"), 2, ["choose one of q4_0, "]),
        (("cut.gguf", "out.gguf"), 1, ["cut.gguf: cut short: fetch the file again"]),
        (("nan.gguf", "out.gguf"), 1, ["blk.1.ffn_up.weight", "no finite numbers"]),
        (("nan", "out"), 1, ["model.layers.0.mlp.up_proj.weight", "no finite numbers"]),
        (("tiny.gguf", "no/such/out.gguf"), 1, ["cannot write", "No such file"]),
    ],
)
def test_refusals_leave_nothing(given: tuple[str, ...], code: int, words: list[str], tmp_path: Path) -> None:
    save_llama_gguf(tmp_path / "tiny.gguf", form="F16")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:70_000])
    (tmp_path / "there.gguf").touch()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").touch()
    _with_nan(tmp_path / "tiny.gguf", tmp_path / "nan.gguf", "blk.1.ffn_up.weight")
    save_llama(tmp_path / "llama", layers=1)
    save_llama(tmp_path / "nan", layers=1)
    values = load_file(tmp_path / "nan" / "model.safetensors")
    values["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(values, tmp_path / "nan" / "model.safetensors", {"format": "pt"})
    before = sorted(tmp_path.rglob("*"))
    assert_clear(invoke("quantize", "--format", "q8_0", *given, cwd=tmp_path), code, *words)
    assert sorted(tmp_path.rglob("*")) == before


def _with_nan(file: Path, out: Path, name: str) -> None:
    """Copy a file, with a value of a tensor in F16 that is no number."""
    data = bytearray(file.read_bytes())
    begin = int(read(file)[name].data_offset)
    data[begin + 100 : begin + 102] = b"\x00\x7e"
    out.write_bytes(data)


@pytest.mark.parametrize("model", ["tiny.gguf", "llama"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_one_leaves_nothing(model: str, error: BaseException, tmp_path: Path) -> None:
    save_llama_gguf(tmp_path / "tiny.gguf", form="F16")
    save_llama(tmp_path / "llama", layers=1)
    before = sorted(tmp_path.rglob("*"))

    def fail(_done: int, _total: int) -> None:
        raise error

    out = tmp_path / ("out.gguf" if model.endswith(".gguf") else "out")
    with pytest.raises(
        (KeyboardInterrupt, LocalError), match=None if isinstance(error, KeyboardInterrupt) else "free disk"
    ):
        quantise_model(str(tmp_path / model), out, "q8_0", progress=fail)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_is_too_small_is_told_before(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("swarmnode.swarm.storage.small_files.shutil.disk_usage", lambda _: usage)
    with pytest.raises(LocalError, match=r"tiny.gguf takes .* kB, and .* has 1 kB left"):
        quantise_model(str(wide), tmp_path / "tiny.gguf", "q8_0")
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_rows_have_no_blocks_is_not_packed(tmp_path: Path) -> None:
    save_llama(tmp_path / "odd", layers=1, hidden_size=40, intermediate_size=72)
    with pytest.raises(CheckpointError, match="none can be packed"):
        quantise_model(str(tmp_path / "odd"), tmp_path / "packed", "q4_0")


def test_json(wide: Path, tmp_path: Path) -> None:
    done = invoke("quantize", str(wide), "tiny.gguf", "--format", "q5_1", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["out"] == "tiny.gguf" and told["bytes"] == (tmp_path / "tiny.gguf").stat().st_size
    assert told["formats"] == {"Q5_1": 15, "Q8_0": 1} and len(told["notices"]) == 1


@needs_ggml
@pytest.mark.parametrize("form", ["q4_0", "mxfp4"])
def test_a_node_multiplies_a_packed_folder_as_its_dequantised_values(form: str, tmp_path: Path) -> None:
    save_llama(tmp_path / "plain", layers=2)
    quantise_model(str(tmp_path / "plain"), tmp_path / "packed", form)
    checkpoint, ids = Checkpoint(tmp_path / "packed"), torch.arange(12)[None]
    with torch.inference_mode():
        exact, plain = (
            load_model(checkpoint, 0, 4, dtype=torch.float32, products=products)(ids).logits
            for products in (EXACT, PLAIN)
        )
    torch.testing.assert_close(exact, plain, rtol=1e-4, atol=1e-4)
