"""GGUF models by hub id and quant, as Ollama and llama.cpp take them, against a small hub on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.hub import _label, _models
from swarmnode.errors import CheckpointError, UsageError
from swarmnode.founding.model_source import outline
from swarmnode.founding.quantisation import quantise_model
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.cli.command import assert_clear, invoke
from tests.compute.model.llama_gguf import save_llama_gguf
from tests.compute.model.test_hub import COMMIT, Hub, make_default, serving
from tests.founding.test_quantisation import read

SPLIT = "BF16/tiny-BF16"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Two quants, a third one twice, a split model in a folder, and the projector of images."""
    folder = tmp_path / "hub"
    (folder / "BF16").mkdir(parents=True)
    save_llama_gguf(folder / "tiny-Q8_0.gguf")
    save_llama_gguf(folder / "tiny.q4_0.gguf", form="Q4_0")
    for name in ("tiny-Q5_1.gguf", "tiny-chat-Q5_1.gguf", "mmproj-F16.gguf"):
        (folder / name).write_bytes(b"GGUF")
    save_llama_gguf(
        folder / f"{SPLIT}-00001-of-00002.gguf",
        form="BF16",
        only=lambda name: "blk.0" in name,
        say=lambda writer: writer.add_int32("split.tensors.count", 21),
    )
    save_llama_gguf(folder / f"{SPLIT}-00002-of-00002.gguf", form="BF16", only=lambda name: "blk.0" not in name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with serving(folder) as server:
        make_default(server, monkeypatch)
        yield server


@pytest.mark.parametrize(
    ("model", "files"),
    [
        ("org/model:Q8_0", ["tiny-Q8_0.gguf"]),
        ("hf.co/org/model:q4_0@v1", ["tiny.q4_0.gguf"]),
        ("https://huggingface.co/org/model:BF16", [f"{Path(SPLIT).name}-0000{part}-of-00002.gguf" for part in (1, 2)]),
        ("org/model/tiny-Q8_0.gguf", ["tiny-Q8_0.gguf"]),
        ("org/model:tiny-Q8_0.gguf", ["tiny-Q8_0.gguf"]),
    ],
)
def test_a_swarm_is_founded_on_the_files_of_a_quant(model: str, files: list[str], hub: Hub, tmp_path: Path) -> None:
    done = invoke("create", str(tmp_path / "friends"), "--open", "--model", model)
    assert done.returncode == 0, done.stderr
    assert hub.fetched == files and "cache of huggingface_hub" in done.stdout
    assert Checkpoint(tmp_path / "friends-weights").units == 4
    links = sorted((tmp_path / "friends-weights").glob("*.gguf"))
    assert [link.readlink().name for link in links] == files and COMMIT in str(links[0].readlink())
    assert load_swarm(tmp_path / "friends.swarm").original == model


def test_the_headers_alone_tell_what_fits(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "sizes").mkdir()
    looked_at, _ = outline("org/model:bf16", tmp_path / "sizes")
    assert isinstance(looked_at, Checkpoint) and looked_at.is_packed and not hub.fetched


def test_it_is_quantised(hub: Hub, tmp_path: Path) -> None:
    quantise_model("org/model:BF16", tmp_path / "small.gguf", "q4_0")
    assert read(tmp_path / "small.gguf")["blk.1.attn_q.weight"].tensor_type.name == "Q4_0"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/model:Q3_K_M", ["no GGUF model 'Q3_K_M'", "org/model:BF16, ", "org/model:Q8_0", "org/model:q4_0"]),
        ("org/model:Q5_1", ["2 GGUF models of Q5_1", "org/model/tiny-Q5_1.gguf", "org/model/tiny-chat-Q5_1.gguf"]),
        ("hf.co/org/model", ["5 GGUF models: give one of", "org/model/tiny-Q8_0.gguf"]),
        ("org/model/none.gguf", ["no GGUF model 'none.gguf'"]),
        ("org/model:Q8_0@v9", ["no revision v9"]),
        ("org/model", ["no config.json", "give hf.co/org/model, or org/model:QUANT"]),
        ("org/nothing:Q8_0", ["neither a folder here nor a model on the hub"]),
    ],
)
def test_what_is_there_is_told(model: str, words: list[str], hub: Hub, tmp_path: Path) -> None:
    usage = 1 if "nothing" in model or "@" in model or model == "org/model" else 2
    assert_clear(invoke("create", str(tmp_path / "friends"), "--open", "--model", model), usage, *words)
    assert not hub.fetched and [path.name for path in tmp_path.iterdir()] == ["hub"]


def test_a_damaged_download_is_removed(hub: Hub, tmp_path: Path) -> None:
    hub.damage = 1
    with pytest.raises(CheckpointError, match=r"tiny-Q8_0\.gguf was damaged on its way"):
        quantise_model("org/model:Q8_0", tmp_path / "small.gguf", "q4_0", again=True)
    with pytest.raises(UsageError, match="packed already"):
        quantise_model("org/model:Q8_0", tmp_path / "small.gguf", "q4_0")  # fetched anew


def test_quants_of_names() -> None:
    names = [
        "a-UD-Q4_K_XL.gguf",
        "a.IQ4_XS.gguf",
        "Q6_K/a-Q6_K-00001-of-00002.gguf",
        "a-MXFP4_MOE.gguf",
        "a-f16.gguf",
        "b.gguf",
    ]
    assert [_label(key) for key in _models(frozenset(names))] == [
        "Q6_K",
        "MXFP4_MOE",
        "UD-Q4_K_XL",
        "f16",
        "IQ4_XS",
        "b.gguf",
    ]
