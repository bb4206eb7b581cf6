"""What an adapter's files may be: everything else is refused in a sentence, before anything of it is computed."""

from __future__ import annotations

import math

import pytest
import torch

from swarmnode.compute.model.adapters.adapter_file import MAX_CONFIG_BYTES, adapter_in, read_lora_config
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.errors import CheckpointError
from tests.adapters import ALPHA, RANK, matrices, write_adapter

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def tensors(model):
    return matrices(model, lambda name: "q_proj" in name)


@pytest.fixture(scope="module")
def span(checkpoint_path):
    checkpoint = Checkpoint(checkpoint_path)
    return load_span(checkpoint, 0, checkpoint.units)


def load(folder, span):
    family = span.family
    return adapter_in(folder).load(
        family, span.model, span.start, span.end, device=torch.device("cpu"), dtype=torch.float32
    )


def test_ranks_scale_as_peft_has_it(tmp_path, tensors):
    plain = write_adapter(tmp_path / "plain", tensors)
    stable = write_adapter(tmp_path / "stable", tensors, use_rslora=True)
    assert adapter_in(plain).config.scale == ALPHA / RANK
    assert adapter_in(stable).config.scale == ALPHA / math.sqrt(RANK)


def test_layers_have_ranks_and_scales_of_their_own(tmp_path, model):
    wide, narrow = (
        matrices(model, lambda name, at=at: f"layers.{at}.self_attn.q_proj" in name, rank=rank)
        for at, rank in ((0, 8), (1, 2))
    )
    fields = {
        "rank_pattern": {"layers.0.self_attn.q_proj": 8, "q_proj": 2},
        "alpha_pattern": {"^model.layers.1.self_attn.q_proj": 5, r"layers\.0\.self_attn\.q_proj$": 3, "proj": 99},
    }
    config = adapter_in(write_adapter(tmp_path, wide | narrow, **fields)).config
    assert [config.rank_of(f"model.layers.{at}.self_attn.q_proj") for at in (0, 1)] == [8, 2]
    assert [config.scale_of(f"model.layers.{at}.self_attn.q_proj") for at in (0, 1)] == [3 / 8, 5 / 2]
    assert config.scale_of("model.layers.0.mlp.up_proj") == config.scale == ALPHA / RANK


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("lm_head.weight", (5, 5), "parameters of other shapes"),
        ("model.layers.0.self_attn.bias", (64,), "no layer of the model that can be replaced"),
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), "changed and replaced"),
        ("model.layers.0.self_attn.q_proj.scale", (64,), "no matrix A or B"),
    ],
)
def test_replaced_layers_that_do_not_fit_are_refused(tmp_path, tensors, span, name, shape, said):
    saved = {**tensors, f"base_model.model.{name}": torch.ones(shape)}
    with pytest.raises(CheckpointError, match=said):
        load(write_adapter(tmp_path, saved, modules_to_save=["lm_head", "self_attn"]), span)


def test_neutral_fields_are_taken(tmp_path, tensors):
    fields = {
        "base_model_name_or_path": "somebody/model",
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.1,
        "init_lora_weights": "gaussian",
        "loftq_config": {},
        "megatron_core": "megatron.core",
        "qalora_group_size": 16,
        "some_future_switch": False,
        "some_future_settings": {"some_switch": None},
    }
    assert adapter_in(write_adapter(tmp_path, tensors, **fields)).config.rank == RANK


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"use_dora": True}, "lacks DoRA's magnitudes"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"modules_to_save": "lm_head"}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "the config says 8"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern must be"),
        ({"rank_pattern": {"(a+)+b": 4}}, "regular expression"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must map"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern must be"),
        ({"alpha_pattern": {"x" * 300: 8}}, "regular expression"),
        ({"target_parameters": ["experts.gate"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"init_lora_weights": ["pissa"]}, "pissa"),
        ({"use_bdlora": {"blocks": 2}}, "use_bdlora"),
        ({"some_future_switch": True}, "some_future_switch"),
        ({"r": 0}, "r must be"),
        ({"r": "4"}, "r must be"),
        ({"r": True}, "r must be"),
        ({"r": 1 << 20}, "r must be"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": 1e30}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha"),
    ],
)
def test_other_adapters_are_refused(tmp_path, tensors, fields, said):
    with pytest.raises(CheckpointError, match=said):
        adapter_in(write_adapter(tmp_path, tensors, **fields))


@pytest.mark.parametrize("raw", ["[]", "{", "[" * 60_000, " " * (MAX_CONFIG_BYTES + 1), '"LORA"', "\xff"])
def test_hostile_configs_are_refused(tmp_path, raw):
    file = tmp_path / "adapter_config.json"
    file.write_text(raw, encoding="latin-1")
    with pytest.raises(CheckpointError, match=str(file)):
        read_lora_config(file)


def test_a_folder_without_an_adapter_is_none(tmp_path, tensors):
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        adapter_in(tmp_path)
    write_adapter(tmp_path, tensors)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickles are never read"):
        adapter_in(tmp_path)


def changed(tensors, **by_end):
    """The tensors of the first layer's projection with some replaced; None removes one."""
    replaced = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    for end, tensor in by_end.items():
        name = f"{Q0}.lora_{end}.weight"
        replaced = {key: value for key, value in replaced.items() if key != name}
        if tensor is not None:
            replaced[name] = tensor
    return replaced


@pytest.mark.parametrize(
    ("by_end", "said"),
    [
        ({"A": None}, "lacks one of its two"),
        ({"A": torch.ones(RANK + 1, 64)}, "the config says"),
        ({"B": torch.ones(64, RANK - 1)}, "the config says"),
        ({"A": torch.ones(RANK)}, "no matrix"),
        ({"A": torch.ones(RANK, 64, dtype=torch.int8)}, "no matrix"),
    ],
)
def test_matrices_that_do_not_fit_one_another_are_refused(tmp_path, tensors, by_end, said):
    with pytest.raises(CheckpointError, match=said):
        adapter_in(write_adapter(tmp_path, changed(tensors, **by_end)))


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.embed_tokens.lora_embedding_A",
        f"{Q0}.lora_magnitude_vector.weight",
        f"{Q0}.lora_B.bias",
        "x" * 100_000,
    ],
)
def test_other_tensors_are_refused(tmp_path, tensors, name):
    with pytest.raises(CheckpointError, match="no matrix A or B") as caught:
        adapter_in(write_adapter(tmp_path, {**tensors, name: torch.ones(4, 4)}))
    assert len(str(caught.value)) < 500


def test_a_layer_that_is_there_twice_is_refused(tmp_path, tensors):
    again = {f"{Q0}.lora_A.default.weight": tensors[f"{Q0}.lora_A.weight"].clone()}
    with pytest.raises(CheckpointError, match="twice"):
        adapter_in(write_adapter(tmp_path, {**tensors, **again}))


def test_a_file_that_was_cut_short_is_refused(tmp_path, tensors):
    file = write_adapter(tmp_path, tensors) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        adapter_in(tmp_path)


@pytest.mark.parametrize(
    ("module", "inputs", "outputs", "said"),
    [
        ("model.layers.0.self_attn.q_proj", 8, 8, "maps"),
        ("model.layers.0.self_attn.x_proj", 8, 8, "no layer"),
        ("model.layers.0.input_layernorm", 8, 8, "not a linear layer"),
        ("model.layers.0.self_attn", 8, 8, "not a linear layer"),
        ("model.layers.0.self_attn.q_proj.weight", 8, 8, "no layer"),
    ],
)
def test_layers_that_the_model_does_not_have_are_refused(tmp_path, span, module, inputs, outputs, said):
    key = f"base_model.model.{module}"
    tensors = {f"{key}.lora_A.weight": torch.ones(RANK, inputs), f"{key}.lora_B.weight": torch.ones(outputs, RANK)}
    with pytest.raises(CheckpointError, match=said):
        load(write_adapter(tmp_path, tensors), span)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(tmp_path, tensors, span, bad):
    replaced = {name: tensor.clone() for name, tensor in tensors.items()}
    replaced[f"{Q0}.lora_B.weight"][3, 2] = bad
    folder = write_adapter(tmp_path, replaced)
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        load(folder, span)
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        adapter_in(folder).check_numbers()


def test_numbers_too_large_for_the_format_that_is_computed_in_are_refused(tmp_path, tensors, span):
    replaced = {name: tensor.clone() for name, tensor in tensors.items()}
    replaced[f"{Q0}.lora_B.weight"][3, 2] = 4e4  # times the scale of 2
    file = adapter_in(write_adapter(tmp_path, replaced))
    with pytest.raises(CheckpointError, match="float16"):
        file.load(span.family, span.model, 0, span.end, device=torch.device("cpu"), dtype=torch.float16)


def test_only_what_the_units_need_is_read(tmp_path, tensors, span):
    file = adapter_in(write_adapter(tmp_path, tensors))
    first = file.layers_of(span.family, 0, 2)
    assert list(first) == ["model.layers.0.self_attn.q_proj"]
    wanted = file.tensors_of(span.family, 0, 2)
    with file.weights.open("r+b") as stream:  # everything else is not here
        data = stream.read()
        header = 8 + int.from_bytes(data[:8], "little")
        kept = bytearray(data[:header]).ljust(len(data), b"\xff")
        for entry in wanted:
            kept[entry.begin : entry.end] = data[entry.begin : entry.end]
        stream.seek(0)
        stream.write(kept)
    cpu = torch.device("cpu")
    loaded = file.load(span.family, span.model, 0, 2, device=cpu, dtype=torch.float32)
    lora = loaded["model.layers.0.self_attn.q_proj"]
    assert torch.equal(lora.a_RI, tensors[f"{Q0}.lora_A.weight"])
    assert torch.equal(lora.b_OR, tensors[f"{Q0}.lora_B.weight"] * (ALPHA / RANK))
    assert file.bytes_of(span.family, 0, 2, torch.bfloat16) == 2 * (lora.a_RI.numel() + lora.b_OR.numel())
    with pytest.raises(CheckpointError, match="NaN"):
        file.load(span.family, span.model, 2, 3, device=cpu, dtype=torch.float32)


@pytest.mark.parametrize("more", [1, 2, 64])
@pytest.mark.parametrize("where", ["model.embed_tokens", "lm_head", "lm_head.base_layer"])
def test_added_tokens_are_named(tmp_path, tensors, span, more, where):
    rows, width = span.model.get_submodule("model.embed_tokens").weight.shape
    saved = {**tensors, f"base_model.model.{where}.weight": torch.ones(rows + more, width)}
    with pytest.raises(CheckpointError, match=f"{more} more tokens than the base"):
        load(write_adapter(tmp_path, saved), span)
    saved[f"base_model.model.{where}.weight"] = torch.ones(rows, width)
    assert load(write_adapter(tmp_path, saved), span).keys() == load(write_adapter(tmp_path, tensors), span).keys()
