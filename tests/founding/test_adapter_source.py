"""Founding with adapters: what is copied and listed, and what is refused before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swarmnode.errors import CheckpointError, UsageError
from swarmnode.founding.model_source import ModelSource, from_checkpoint
from swarmnode.founding.swarm_creation import Bootstraps, create_swarm, from_folders
from swarmnode.swarm.records.manifest import GRAPH
from swarmnode.swarm.storage.content import verify_file
from swarmnode.swarm.storage.swarmfile import load_swarm, save_swarm
from tests.adapters import save_llama_adapter, write_adapter
from tests.cli.command import assert_clear, invoke
from tests.llama import save_llama

SIZES = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32}


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    save_llama(tmp_path / "model", 2, **SIZES)
    return from_checkpoint(str(tmp_path / "model"), tmp_path / "none")


@pytest.fixture
def verse(source: ModelSource, tmp_path: Path) -> Path:
    return save_llama_adapter(tmp_path / "verse", source.folder)


def test_a_swarm_lists_its_adapters_and_keeps_copies(source: ModelSource, verse: Path, tmp_path: Path) -> None:
    adapters = from_folders({"verse": verse, "v2.1": verse}, source, tmp_path / "out")
    swarm = create_swarm("poets", source, Bootstraps(), adapters=adapters)
    save_swarm(swarm, tmp_path / "poets.swarm")
    loaded = load_swarm(tmp_path / "poets.swarm")
    assert loaded.manifest is not None and loaded.manifest.format == 3
    assert loaded.manifest.adapter_names == ("verse", "v2.1")
    assert loaded.adapters == tmp_path / "out"
    assert all(
        verify_file(loaded.adapters / file.name, file) for one in loaded.manifest.adapters or () for file in one.files
    )


def test_a_swarm_without_adapters_is_what_it_was(source: ModelSource) -> None:
    manifest = create_swarm("plain", source, Bootstraps()).manifest
    assert manifest is not None and (manifest.format, manifest.adapters or ()) == (1, ())


def test_an_adapter_of_another_model_is_refused(source: ModelSource, tmp_path: Path) -> None:
    save_llama(tmp_path / "larger", 2, **{**SIZES, "hidden_size": 32})
    save_llama(tmp_path / "deeper", 3, **SIZES)
    for name, said in (("larger", "maps"), ("deeper", "no layer model.layers.2")):
        other = save_llama_adapter(tmp_path / f"{name}-verse", tmp_path / name)
        with pytest.raises(CheckpointError, match=said):
            from_folders({"verse": other}, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_none_are_found_before_anybody_has_them(
    source: ModelSource, verse: Path, tmp_path: Path
) -> None:
    tensors = load_file(verse / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="NaN"):
        from_folders({"verse": write_adapter(tmp_path / "nan", tensors)}, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_what_generates_text_has_adapters(source: ModelSource, verse: Path, tmp_path: Path) -> None:
    graph = ModelSource(source.folder, source.files, GRAPH, source.model)
    with pytest.raises(UsageError, match="generate text"):
        from_folders({"verse": verse}, graph, tmp_path / "out")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")  # of peft
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=len)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")], ids="-".join
)
def test_layers_of_the_model_that_peft_saved_are_passed_over_or_refused(
    tmp_path: Path, tied: bool, targets: list[str], dtypes: tuple[str, str]
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    of_base, of_adapter = (getattr(torch, dtype) for dtype in dtypes)
    save_llama(tmp_path / "model", 2, **SIZES, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=of_base)
    model.save_pretrained(tmp_path / "model")
    source = from_checkpoint(str(tmp_path / "model"), tmp_path / "none")
    tuned = peft.get_peft_model(model.to(of_adapter), peft.LoraConfig(r=4, target_modules=targets))
    tuned.save_pretrained(tmp_path / "verse", save_embedding_layers=True)
    saved = load_file(tmp_path / "verse" / "adapter_model.safetensors")
    base_layers = [name for name in saved if "lora_" not in name]
    assert base_layers
    from_folders({"verse": tmp_path / "verse"}, source, tmp_path / "out")
    for name in base_layers:
        changed = {**saved, name: saved[name].clone()}
        changed[name][5, 3] += 1
        config = json.loads((tmp_path / "verse" / "adapter_config.json").read_text())
        with pytest.raises(CheckpointError, match=r"differs from it in 1 of 256 rows"):
            from_folders({"verse": write_adapter(tmp_path / "new", changed, **config)}, source, tmp_path / "no")
        narrow = {**saved, name: saved[name][:200].clone()}
        with pytest.raises(CheckpointError, match=r"\[200, 16\] instead of \[256, 16\]"):
            from_folders({"verse": write_adapter(tmp_path / "new", narrow, **config)}, source, tmp_path / "no")


@pytest.mark.parametrize("name", ["", "-v", ".v", "a/b", "a b", "ä", "v" * 65, "a:b"])
def test_names_that_files_and_models_cannot_have(source: ModelSource, verse: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="name for an adapter"):
        from_folders({name: verse}, source, tmp_path / "out")


def test_the_command_says_what_is_wrong(source: ModelSource, verse: Path, tmp_path: Path) -> None:
    found = ("create", "poets", "--model", str(source.folder))
    for given, *said in (
        ("verse", "--adapter takes a name and a folder"),
        ("=x", "--adapter takes a name and a folder"),
        (f"verse={tmp_path / 'nowhere'}", "has no adapter_config.json"),
    ):
        done = invoke(*found, "--adapter", given, cwd=tmp_path)
        assert_clear(done, done.returncode, *said)
        assert done.returncode in (1, 2)
    twice = invoke(*found, "--adapter", f"verse={verse}", "--adapter", f"Verse={verse}", cwd=tmp_path)
    assert_clear(twice, 2, "same name")
    trains = invoke(*found, "--mode", "train", "--adapter", f"verse={verse}", cwd=tmp_path)
    assert_clear(trains, 2, "--adapter needs --model and --mode serve")
    assert not list(tmp_path.glob("poets*")), "nothing is left of what failed"
    done = invoke(*found, "--adapter", f"verse={verse}", "--json", cwd=tmp_path)
    assert done.returncode == 0 and '"adapters": ["verse"]' in " ".join(done.stdout.split())
    assert {path.name for path in (tmp_path / "poets-adapters").iterdir()} == {
        "adapter-verse.json",
        "adapter-verse.safetensors",
    }
