"""GGUF files made plain: the model that transformers makes of one, and files that are cut short, several, or of another kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swarmnode.compute.gguf.gguf import GgufCheckpoint, find_gguf
from swarmnode.compute.model.checkpoint import Checkpoint, load_config
from swarmnode.compute.model.family import switching_position
from swarmnode.errors import CheckpointError, LocalError
from tests.compute.model.llama_gguf import save_llama_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny-q8.gguf"
    save_llama_gguf(path)
    return path


def test_it_is_the_model_that_transformers_makes_of_it(file: Path, tmp_path: Path) -> None:
    told: list[int] = []
    source = GgufCheckpoint(file)
    source.write(tmp_path, lambda done, total: told.append(done * 100 // total))
    auto: Any = AutoModelForCausalLM
    reference = auto.from_config(load_config(tmp_path / "config.json"))
    read: Any = load_gguf_checkpoint
    reference.load_state_dict(read(str(file), return_tensors=True, model_to_load=reference)["tensors"])
    ours, problems = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not problems["missing_keys"] and not problems["unexpected_keys"]
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        assert ours(ids).logits.equal(reference(ids).logits)
    assert Checkpoint(tmp_path).units == 4
    assert told[-1] == 100
    words = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert words["th"] == 256


def test_a_tokenizer_beside_it_is_taken(file: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "out").mkdir()
    GgufCheckpoint(tmp_path / "tiny.gguf").write(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_a_tokenizer_that_cannot_be_written_is_an_error_of_this_machine(file: Path, tmp_path: Path) -> None:
    """The tokenizers library raises a bare Exception, also on a full disk."""
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(LocalError, match=f"cannot be written into {tmp_path}: Is a directory"):
        GgufCheckpoint(file).pack(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.99])
def test_one_that_is_cut_short_is_refused(file: Path, tmp_path: Path, share: float) -> None:
    data = file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"cut.gguf"):
        GgufCheckpoint(tmp_path / "cut.gguf").write(tmp_path)


def test_one_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    save_llama_gguf(tmp_path / "lacking.gguf", without="blk.1.ffn_up.weight")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors.*up_proj"):
        GgufCheckpoint(tmp_path / "lacking.gguf").write(tmp_path)


def test_one_with_tensors_that_the_model_has_no_place_for_is_refused(tmp_path: Path) -> None:
    save_llama_gguf(tmp_path / "biased.gguf", beside={"blk.1.attn_q.bias": [0.5] * 64})
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_q\.bias has no place in a llama model"):
        GgufCheckpoint(tmp_path / "biased.gguf").write(tmp_path)


def test_factors_of_its_frequencies_are_the_models(tmp_path: Path) -> None:
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    save_llama_gguf(tmp_path / "long.gguf", beside={"rope_freqs.weight": factors})
    GgufCheckpoint(tmp_path / "long.gguf").write(tmp_path)
    config = load_config(tmp_path / "config.json")
    turns, attention = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"))
    torch.testing.assert_close(turns, 10000.0 ** -(torch.arange(8) / 8) / torch.tensor(factors))
    assert (attention, switching_position(config)) == (1.0, 2048)


TABLES: list[tuple[str, str, Any, str]] = [
    ("gpt2", "merges", None, r"it has no tokenizer\.ggml\.merges, the pairs that make its tokens"),
    ("gpt2", "merges", [1, 2], r"its tokenizer\.ggml\.merges is no list of texts"),
    ("gpt2", "merges", "t h", r"its tokenizer\.ggml\.merges is no list of texts"),
    ("gpt2", "merges", ["t h", "th"], r"its tokenizer\.ggml\.merges has an entry that is no pair"),
    ("gpt2", "merges", ["zz yy"], "its merges do not fit its tokens"),
    ("gpt2", "token_type", [1, 1], r"its tokenizer\.ggml\.token_type has 2 entries for 257 tokens"),
    ("gpt2", "token_type", ["a"] * 257, r"its tokenizer\.ggml\.token_type is no list of whole numbers"),
    ("gpt2", "tokens", ["a"] * 257, "its tokenizer has a token twice"),
    ("gpt2", "tokens", [1] * 257, r"its tokenizer\.ggml\.tokens is no list of texts"),
    ("llama", "scores", None, r"it has no tokenizer\.ggml\.scores, the order"),
    ("llama", "scores", [1.0], r"its tokenizer\.ggml\.scores has 1 entries for 257 tokens"),
    ("rwkv", "merges", None, "its tokenizer is of the kind 'rwkv'"),
]


@pytest.mark.parametrize(("kind", "table", "value", "said"), TABLES, ids=str)
def test_a_tokenizer_without_one_of_its_tables_is_refused_by_its_name(
    tmp_path: Path, kind: str, table: str, value: Any, said: str
) -> None:
    def say(writer: Any) -> None:
        from gguf import GGUFValueType
        from gguf.gguf_writer import GGUFValue

        (values,) = writer.kv_data
        values["tokenizer.ggml.model"].value = kind
        values.pop(f"tokenizer.ggml.{table}", None)
        if value is not None:
            known = isinstance(value, str)
            values[f"tokenizer.ggml.{table}"] = GGUFValue(
                value,
                GGUFValueType.STRING if known else GGUFValueType.ARRAY,
                None if known else GGUFValueType.get_type(value[0]),
            )

    save_llama_gguf(tmp_path / "a.gguf", say=say)
    with pytest.raises(
        CheckpointError, match=rf"tokenizer cannot be read \({said}.*put the model's tokenizer\.json beside it"
    ):
        GgufCheckpoint(tmp_path / "a.gguf").write(tmp_path)


def test_one_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    save_llama_gguf(tmp_path / "other.gguf", architecture="rwkv6")
    with pytest.raises(CheckpointError, match="rwkv6"):
        GgufCheckpoint(tmp_path / "other.gguf")


def test_which_file_is_meant(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    one, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    one.touch()
    assert find_gguf(tmp_path) == find_gguf(one) == one
    other.touch()
    with pytest.raises(CheckpointError, match=r"2 GGUF files.*a\.gguf"):
        find_gguf(tmp_path)
    assert find_gguf(other) == other
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(tmp_path) is None
    parts = [tmp_path / "split" / f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    parts[0].parent.mkdir()
    for part in parts[:2]:
        part.touch()
    with pytest.raises(CheckpointError, match=r"one part of 3, and model-00003-of-00003"):
        find_gguf(parts[1])
    parts[2].touch()
    assert {find_gguf(path) for path in (*parts, parts[0].parent)} == {parts[0]}


def test_the_parts_of_a_split_model_are_one(file: Path, tmp_path: Path) -> None:
    """As `llama-gguf-split` writes them: the values in the first part, tensors in all of them."""
    split, whole = tmp_path / "split", tmp_path / "whole"
    split.mkdir(), whole.mkdir()
    save_llama_gguf(
        split / "tiny-00001-of-00002.gguf",
        only=lambda name: "blk.0" in name,
        say=lambda writer: writer.add_uint16("split.count", 2),
    )
    save_llama_gguf(split / "tiny-00002-of-00002.gguf", only=lambda name: "blk.0" not in name)
    GgufCheckpoint(split / "tiny-00001-of-00002.gguf").write(tmp_path)
    GgufCheckpoint(file).write(whole)
    made, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path, whole))
    assert made.keys() == expected.keys() and all(made[name].equal(expected[name]) for name in made)
    assert (tmp_path / "config.json").read_text() == (whole / "config.json").read_text()
