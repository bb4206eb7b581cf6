"""A damaged quantised checkpoint founds no swarm: one sentence says why, and nothing stays behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarmnode.errors import CheckpointError
from swarmnode.founding.model_source import from_model
from tests.compute.packing.test_dequantize import PROJECTION, quantise, spoilt, without
from tests.llama import save_llama

Spoil = Callable[[dict[str, Tensor]], object]
STATE = ".weight.quant_state.bitsandbytes__nf4"


def rewritten(**values: Any) -> Spoil:
    """Change fields of the state beside a matrix of bitsandbytes."""

    def change(state: Tensor) -> Tensor:
        told = json.loads(bytes(state.tolist())) | values
        return torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)

    return spoilt(STATE, change)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder, layers=1)
    return folder


def refusal(folder: Path) -> str:
    """Return the sentence that refuses the folder, and check that nothing was written."""
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        from_model(str(folder), folder.parent / "weights", packs=True)
    assert sorted(folder.parent.rglob("*")) == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("method", "spoil", "message"),
    [
        ("gptq-4", without(".scales"), "scales is missing"),
        ("gptq-4", without(".qzeros"), "qzeros is missing"),
        ("gptq-4", without(".qweight"), "missing"),
        ("gptq-4", spoilt(".scales", lambda scales: scales * torch.nan), "no finite numbers"),
        ("gptq-4", spoilt(".scales", lambda scales: scales[:1]), "do not fit"),
        ("gptq-4", spoilt(".qweight", lambda words: words[:-4]), "smaller groups"),
        ("gptq-4", spoilt(".qweight", lambda words: words[:, :-32]), "do not fit"),
        ("gptq-ordered", spoilt(".g_idx", lambda group: group - 1), "no scales"),
        ("awq", spoilt(".qzeros", lambda zeros: zeros[:, :-1]), "do not fit"),
        ("w4a16", without(".weight_scale"), "weight_scale is missing"),
        ("w4a16", without(".weight_shape"), "weight_shape is missing"),
        ("w4a16", spoilt(".weight_shape", lambda shape: shape * 1000), "4 bits"),
        ("w4a16", spoilt(".weight_shape", lambda shape: -shape), "4 bits"),
        ("w4a16-zeros", spoilt(".weight_zero_point", lambda zeros: zeros[:-1]), "do not fit"),
        ("w4a16-ordered", spoilt(".weight_g_idx", lambda group: group[:-1]), "no scales"),
        ("fp8", spoilt(".weight", lambda weight: (weight.float() * torch.nan).to(weight.dtype)), "no finite numbers"),
        ("fp8", spoilt(".weight_scale_inv", lambda scales: scales[:-1]), "do not fit"),
        ("nf4", spoilt(".weight.absmax", lambda scales: scales / 0), "no finite numbers"),
        ("nf4", spoilt(".weight.quant_map", lambda table: table[:3]), "too short"),
        ("nf4", rewritten(blocksize=0), "damaged"),
        ("nf4", rewritten(shape=[1 << 40, 1 << 40]), "does not hold"),
        ("nf4", rewritten(shape=[64, "many"]), "damaged"),
        ("int8", spoilt(".SCB", lambda largest: largest[:-1]), "do not fit"),
    ],
)
def test_tensors_that_do_not_fit(llama: Path, tmp_path: Path, method: str, spoil: Spoil, message: str) -> None:
    quantise(llama, tmp_path / "quantised", method)
    file = tmp_path / "quantised" / "model.safetensors"
    tensors = load_file(file)
    spoil(tensors)
    save_file(tensors, file)
    told = refusal(tmp_path / "quantised")
    assert PROJECTION in told
    assert any(part in told for part in message.split("|")), told


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"group_size": 0.5}, "group_size"),
        ({"group_size": 64}, "smaller groups"),
        ({"group_size": 8}, "no scales"),
        ({"bits": 5}, "5 bits"),
        ({"bits": 8}, "do not fit"),
    ],
)
def test_settings_that_do_not_fit(llama: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    quantise(llama, tmp_path / "quantised", "gptq-4")
    file = tmp_path / "quantised" / "config.json"
    described = json.loads(file.read_text())
    described["quantization_config"] |= settings
    file.write_text(json.dumps(described))
    told = refusal(tmp_path / "quantised")
    assert any(part in told for part in message.split("|")), told


def test_a_file_that_is_cut_short(llama: Path, tmp_path: Path) -> None:
    quantise(llama, tmp_path / "quantised", "awq")
    file = tmp_path / "quantised" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "truncated" in refusal(tmp_path / "quantised")
