import hashlib
import json
import random
from pathlib import Path

import pytest

from swarmnode.errors import CheckpointError
from swarmnode.swarm.storage import content
from swarmnode.swarm.storage.content import CHUNK_BYTES, FileContent


def make_checkpoint(folder, *, weights_bytes=3 * CHUNK_BYTES + 77, seed=1):
    """A folder that looks like a checkpoint: config, one file of random bytes, and things that do not belong."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(random.Random(seed).randbytes(weights_bytes))
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    return folder


def test_only_the_files_that_matter(tmp_path):
    names = [path.name for path in content.checkpoint_files(make_checkpoint(tmp_path / "c"))]
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]


def test_index_decides_which_weights(tmp_path):
    folder = make_checkpoint(tmp_path / "c")
    (folder / "consolidated.safetensors").write_bytes(b"x")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / content.INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks \w+\.safetensors"):
        content.checkpoint_files(folder)
    for name in index["weight_map"].values():
        (folder / name).write_bytes(b"y")
    names = [path.name for path in content.checkpoint_files(folder)]
    assert [name for name in names if content.is_weights(name)] == ["one.safetensors", "two.safetensors"]


@pytest.mark.parametrize(
    "index", ["[]", "{", '{"weight_map": {"a": "../../etc/passwd"}}', '{"weight_map": {"a": 3}}', '{"weight_map": 1}']
)
def test_bad_index_is_refused(tmp_path, index):
    folder = make_checkpoint(tmp_path / "c")
    (folder / content.INDEX_NAME).write_text(index)
    with pytest.raises(CheckpointError):
        content.checkpoint_files(folder)


def test_folder_without_safetensors_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path / "c")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="save_pretrained"):
        content.checkpoint_files(folder)
    with pytest.raises(CheckpointError, match="not a folder"):
        content.checkpoint_files(tmp_path / "nowhere")


def test_root_is_the_hash_of_the_chunk_hashes(tmp_path):
    folder = make_checkpoint(tmp_path / "c")
    seen = []
    files = content.describe_files(
        content.checkpoint_files(folder), progress=lambda done, total: seen.append((done, total))
    )
    data = (folder / "model.safetensors").read_bytes()
    hashes = [hashlib.sha256(data[at : at + CHUNK_BYTES]).digest() for at in range(0, len(data), CHUNK_BYTES)]
    weights = files[1]
    assert weights == FileContent("model.safetensors", len(data), hashlib.sha256(b"".join(hashes)).digest())
    assert weights.chunks() == 4
    assert weights.chunk_size(3) == 77
    total = sum(file.size for file in files)
    assert seen[-1] == (total, total)


def test_verify_finds_every_change(tmp_path):
    folder = make_checkpoint(tmp_path / "c")
    path = folder / "model.safetensors"
    (weights,) = content.describe_files([path])
    hashes = content.chunk_hashes(path)
    assert content.verify_hashes(weights, hashes)
    assert not content.verify_hashes(weights, hashes[:-32])
    assert not content.verify_hashes(weights, bytes(32) + hashes[32:])
    last = path.read_bytes()[3 * CHUNK_BYTES :]
    assert content.verify_chunk(hashes, 3, last)
    assert not content.verify_chunk(hashes, 2, last)
    assert not content.verify_chunk(hashes, 4, b"")
    assert content.verify_file(path, weights)
    with path.open("r+b") as file:
        file.seek(CHUNK_BYTES)
        file.write(b"tampered")
    assert not content.verify_file(path, weights)


def test_empty_file_has_no_chunks(tmp_path):
    (tmp_path / "vocab.txt").touch()
    (file,) = content.describe_files([tmp_path / "vocab.txt"])
    assert file.chunks() == 0
    assert content.verify_hashes(file, b"")


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("config.json", True),
        ("model-00001-of-00002.safetensors", True),
        ("../model.safetensors", False),
        ("/etc/model.safetensors", False),
        (".hidden.safetensors", False),
        ("a/b.safetensors", False),
        ("modeling.py", False),
        ("weights.bin", False),
        ("m" * 200 + ".safetensors", False),
        ("model\n.safetensors", False),
        ("", False),
    ],
)
def test_names(name, allowed):
    assert content.is_allowed_name(name) is allowed


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 256, 1000])
def test_files_cut_into_pieces_for_many_threads_have_the_roots_of_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(content, "PIECE_CHUNKS", 4)
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(number % 251 for number in range(size)))
    told: list[tuple[int, int]] = []
    (described,) = content.describe_files(
        [path], chunk_bytes=16, threads=3, progress=lambda done, total: told.append((done, total))
    )
    assert described.root == hashlib.sha256(content.chunk_hashes(path, 16)).digest()
    assert told == sorted(told) and (not size or told[-1] == (size, size))
