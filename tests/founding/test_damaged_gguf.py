"""Damaged and foreign GGUF files: one sentence from each command, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    elif fault == "magic":
        data[:4] = b"PK\x03\x04"
    path.write_bytes(data[: len(data) // 2] if fault == "cut" else data)
    return path.rename(folder / "model-00001-of-00002.gguf") if fault == "parts" else path


FAULTS = {
    "cut": ["cut short: fetch the file again"],
    "unknown": ["number format 99, which is unknown here"],
    "blocks": ["rows of 64", "Q4_K, whose blocks have 256"],
    "nan": [MATRIX, "no finite numbers"],
    "magic": ["not a GGUF file"],
    "architecture": ["architecture starcoder9", "safetensors"],
    "parts": ["model-00002-of-00002.gguf is missing"],
}


@pytest.mark.parametrize(
    ("fault", "command"),
    [
        (fault, command)
        for fault in FAULTS
        for command in ("create", "fit", "quantize")
        if (fault, command) not in {("nan", "fit"), ("architecture", "quantize")}  # values are not read; names are kept
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
