"""Damaged and foreign GGUF files: one sentence from each command, and nothing left behind."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from swarmnode.compute.gguf.gguf import GgufCheckpoint
from swarmnode.compute.gguf.repack import GgufRepack
from swarmnode.compute.packing.recipes import recipe_of
from swarmnode.errors import SwarmnodeError
from tests.cli.command import assert_clear, invoke
from tests.compute.model.llama_gguf import save_llama_gguf
from tests.founding.test_quantisation import read

MATRIX = "blk.1.ffn_up.weight"


def damaged(folder: Path, fault: str) -> Path:
    """Write a GGUF file with this fault."""
    path = folder / "model.gguf"
    save_llama_gguf(path, form="Q8_0", architecture="starcoder9" if fault == "architecture" else "llama")
    data, tensor = bytearray(path.read_bytes()), read(path)[MATRIX]
    format_at = data.index(MATRIX.encode()) + len(MATRIX) + 4 + 2 * 8
    if fault in ("unknown", "blocks"):
        data[format_at : format_at + 4] = {"unknown": 99, "blocks": 12}[fault].to_bytes(4, "little")
    elif fault == "nan":
        data[int(tensor.data_offset) : int(tensor.data_offset) + 2] = b"\x00\x7e"
    elif fault == "norm":  # as float32
        place = int(read(path)["blk.0.ffn_norm.weight"].data_offset)
        data[place + 8 : place + 12] = b"\x00\x00\xc0\x7f"
    elif fault == "magic":
        data[:4] = b"PK\x03\x04"
    elif fault in ("version", "order"):
        data[4:8] = (1).to_bytes(4, "little") if fault == "version" else (3).to_bytes(4, "big")
    elif fault == "key":
        data[data.index(b"general.architecture") + 32] = 0xFF
    elif fault == "token":  # the last one, "th"
        data[data.index(b"\x02" + bytes(7) + b"th") + 9] = 0xFF
    path.write_bytes(data[: len(data) // 2] if fault == "cut" else data)
    return path.rename(folder / "model-00001-of-00002.gguf") if fault == "parts" else path


FAULTS = {
    "cut": ["cut short: fetch the file again"],
    "unknown": ["number format 99, which is unknown here"],
    "blocks": ["rows of 64", "Q4_K, whose blocks have 256"],
    "nan": [MATRIX, "no finite numbers"],
    "magic": ["not a GGUF file"],
    "norm": ["layers.0.post_attention_layernorm.weight", "no finite numbers"],
    "version": ["GGUF file of version 1, which is unknown here"],
    "order": ["byte order of other machines"],
    "key": ["general.architecture has a text that is not UTF-8", "fetch the file again"],
    "token": ["tokenizer.ggml.tokens has a text that is not UTF-8", "tokenizer.json"],
    "architecture": ["architecture starcoder9", "safetensors"],
    "parts": ["model-00002-of-00002.gguf is missing"],
}


@pytest.mark.parametrize(
    ("fault", "command"),
    [
        (fault, command)
        for fault in FAULTS
        for command in ("create", "fit", "quantize")
        # `fit` reads no values, and `quantize` keeps names, tokens and norms as they are.
        if not (command == "fit" and fault in ("nan", "norm", "token"))
        and not (command == "quantize" and fault in ("architecture", "norm", "token"))
    ],
)
def test_one_sentence_and_nothing_left(fault: str, command: str, tmp_path: Path) -> None:
    path = damaged(tmp_path, fault)
    before = sorted(tmp_path.iterdir())
    arguments = {
        "create": ("swarm", "--open", "--model", path.name),
        "fit": (path.name, "--device", "cpu"),
        "quantize": (path.name, "out.gguf", "--format", "q4_0", "--allow-requantize"),
    }
    assert_clear(invoke(command, *arguments[command], cwd=tmp_path), 1, path.name.partition("-")[0], *FAULTS[fault])
    assert sorted(tmp_path.iterdir()) == before


EDGES = (0, 1, 2, 3, 9, 0xFF, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)
MUTATIONS, LONGEST_S = 120, 5.0  # CPU seconds


def mutated(data: bytes, header: int, number: int) -> bytes:
    """Return a file with one to three changes in its header: sizes at the edges, other bytes, cuts, or parts twice."""
    draw, changed = random.Random(number), bytearray(data)
    for _ in range(draw.randint(1, 3)):
        place, width = draw.randrange(4, min(header, len(changed))), draw.choice((1, 4, 8))
        match draw.randrange(4):
            case 0 | 1:
                value = draw.choice(EDGES) & ((1 << 8 * width) - 1)
                changed[place : place + width] = value.to_bytes(width, "little")
            case 2:
                changed[place] = draw.randrange(256)
            case _:
                end = draw.randrange(place, max(place + 1, header))
                changed[place:place] = changed[place:end] if draw.random() < 0.5 else b""
                if draw.random() < 0.2:
                    del changed[draw.randrange(place, len(changed)) :]
    return bytes(changed)


def test_a_mutated_header_gives_an_error_of_ours_in_bounded_time(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    save_llama_gguf(file, form="Q8_0")
    data, header = file.read_bytes(), GgufCheckpoint(file).header_bytes
    for number in range(MUTATIONS):
        file.write_bytes(mutated(data, header, number))
        folder = tmp_path / str(number)
        folder.mkdir()
        for attempt in (
            lambda to=folder: GgufCheckpoint(file).outline(to),
            lambda to=folder: GgufCheckpoint(file).pack(to),
            lambda: GgufRepack(file, recipe_of("q4_0")),
        ):
            began_s = time.process_time()
            try:
                attempt()
            except SwarmnodeError as error:
                assert len(str(error)) < 2000
            assert time.process_time() - began_s < LONGEST_S, number


LENGTHS = {  # key and type of a value, and what follows: lengths that nothing of this size has
    "a text": (8, (1 << 64) - 1, b""),
    "an array of numbers": (9, 4, (1 << 40).to_bytes(8, "little")),
    "an array of texts": (9, 8, ((1 << 64) - 1).to_bytes(8, "little")),
    "an array of arrays": (9, 9, (1 << 20).to_bytes(8, "little")),
    "bytes of the file's own": (9, 0, (5 << 20).to_bytes(8, "little") + bytes(5 << 20)),
}


@pytest.mark.parametrize("what", LENGTHS)
def test_a_length_in_a_header_is_held_against_the_file(what: str, tmp_path: Path) -> None:
    file, (kind, length, rest) = tmp_path / "model.gguf", LENGTHS[what]
    size = 4 if kind == 9 else 8
    value = kind.to_bytes(4, "little") + length.to_bytes(size, "little") + rest
    counts = (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + counts + (1).to_bytes(8, "little") + b"k" + value)
    began_s = time.process_time()
    with pytest.raises(SwarmnodeError, match="its header"):
        GgufCheckpoint(file)
    assert time.process_time() - began_s < LONGEST_S


@pytest.mark.parametrize(
    "key", ["attention.head_count", "attention.head_count_kv", "rope.dimension_count", "block_count"]
)
@pytest.mark.parametrize("value", [0, 4096])
def test_a_size_of_no_model_is_refused_with_its_name(key: str, value: int, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    save_llama_gguf(file, form="Q8_0")
    data = bytearray(file.read_bytes())
    place = data.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
    data[place : place + 4] = value.to_bytes(4, "little")
    file.write_bytes(data)
    names = key if value == 0 else "num_|head|rotary|shape|rope"
    with pytest.raises(SwarmnodeError, match=names):
        GgufCheckpoint(file).pack(tmp_path)
