"""Networks, models and plans that cannot be used: one sentence, exit status 2; and unusual ones that can."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import assert_clear, invoke

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip


def network(devices: int = 3, **changes: Any) -> dict[str, Any]:
    """Equal devices, equally far from one another."""
    links = [[0 if here == there else 5 for there in range(devices)] for here in range(devices)]
    cards = {"memory_gb": [1] * devices, "decode_units_per_s": [100] * devices}
    return {"devices": devices, "delay_ms": links, "bandwidth_gbps": [[0.1] * devices] * devices, **cards, **changes}


def plan(*stages: tuple[int, int, list[int]], **changes: Any) -> dict[str, Any]:
    """Stages as (first unit, the one after the last, devices)."""
    held = [{"units": [start, end], "devices": devices} for start, end, devices in stages]
    return {"stages": held, "pipelines": [[devices[0] for _, _, devices in stages]], **changes}


NETWORKS: dict[str, tuple[Any, str]] = {
    "a gap": (network(bandwidth_gbps=[[0, None, 1], [1, 0, 1], [1, 1, 0]]), "bandwidth_gbps[0][1] is null"),
    "a row too short": (network(delay_ms=[[0, 1], [1, 0, 1], [1, 1, 0]]), "delay_ms[0] has 2 entries"),
    "no bandwidth": (network(bandwidth_gbps=[[0, 1, 1], [1, 0, 0], [1, 1, 0]]), "bandwidth_gbps[1][2] is 0"),
    "NaN": (network(delay_ms=[[0, math.nan, 1], [1, 0, 1], [1, 1, 0]]), "delay_ms[0][1] is nan"),
    "infinity": (network(bandwidth_gbps=[[0, math.inf, 1], [1, 0, 1], [1, 1, 0]]), "bandwidth_gbps[0][1] is inf"),
    "speeds of NaN": (network(decode_units_per_s=[100, math.nan, 1]), "decode_units_per_s[1] is nan"),
    "negative memory": (network(memory_gb=[1, -1, 1]), "memory_gb[1] is -1"),
    "nobody": (network(0), "devices is 0"),
    "an empty file": ("", "not JSON"),
    "an empty object": ({}, "devices is missing"),
    "null": (None, "not a JSON object"),
    "not text": (b"\x00\xff", "not JSON"),
    "a plan": (plan((0, 6, [0])), "devices is missing"),
}
PLANS: dict[str, tuple[Any, str]] = {
    "other units": (plan((0, 9, [0])), "for 9 layers, and the model has 6"),
    "other devices": (plan((0, 6, [3])), "names device 3, but the network has 3"),
    "a gap": (plan((0, 2, [0]), (3, 6, [1])), "do not follow one another"),
    "one device twice": (plan((0, 2, [0]), (2, 6, [0, 1])), "device 0 is in two places"),
    "no stages": (plan(), "do not follow one another"),
    "a network": (network(), "has no 'stages'"),
    "an empty file": ("", "not a plan"),
    "null": (None, "not a JSON object"),
    "not text": (b"\x00\xff", "not a plan"),
}
UNUSUAL: dict[str, dict[str, Any]] = {
    "one device": network(1),
    "asymmetric links": network(
        delay_ms=[[0, 1, 900], [3, 0, 1], [1, 1, 0]], bandwidth_gbps=[[0, 1, 0.001], [0.5, 0, 1], [1, 1, 0]]
    ),
}


def write(path: Path, content: Any) -> str:
    path.write_bytes(content if isinstance(content, bytes) else b"" if content == "" else json.dumps(content).encode())
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write(tmp_path / "config.json", TINY)


@pytest.mark.parametrize("command", ["plan", "plan simulate"])
@pytest.mark.parametrize(("content", "words"), NETWORKS.values(), ids=NETWORKS)
def test_networks_that_are_none(tmp_path: Path, model: str, command: str, content: Any, words: str) -> None:
    file = write(tmp_path / "network.json", content)
    assert_clear(invoke(*command.split(), file, "--model", model), 2, "network.json: ", words)


@pytest.mark.parametrize(("content", "words"), PLANS.values(), ids=PLANS)
def test_plans_that_do_not_fit(tmp_path: Path, model: str, content: Any, words: str) -> None:
    here, there = write(tmp_path / "network.json", network()), write(tmp_path / "plan.json", content)
    done = invoke("plan", "simulate", here, "--model", model, "--workload", "train", "--plan", there)
    assert_clear(done, 2, "plan.json: ", words)


@pytest.mark.parametrize("values", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_networks_are_planned_and_simulated(tmp_path: Path, model: str, values: dict[str, Any]) -> None:
    file, planned = write(tmp_path / "network.json", values), tmp_path / "plan.json"
    done = invoke("plan", file, "--model", model, "--microbatches", "2", "--seconds", "0.1", "--json")
    assert done.returncode == 0, done.stderr
    planned.write_text(done.stdout)
    options = ("--workload", "train", "--microbatches", "2", "--sequence", "16", "--plan", str(planned), "--json")
    lived = invoke("plan", "simulate", file, "--model", model, *options, "--hours", "0.01")
    assert lived.returncode == 0, lived.stderr
    assert json.loads(lived.stdout)["totals"]["steps"] > 0


def test_folders_where_files_should_be(tmp_path: Path, model: str) -> None:
    here, folder = write(tmp_path / "network.json", network()), str(tmp_path)
    train = ("--workload", "train", "--plan", folder)
    for arguments, words in (
        (("plan", folder, "--model", model), "Is a directory"),
        (("plan", "simulate", folder, "--model", model), "Is a directory"),
        (("plan", "simulate", here, "--model", model, *train), "Is a directory"),
        (("plan", "simulate", here, "--model", model, "--report", folder), "--report"),
        (("status", "x.swarm", "--export", "--output", folder), "--output"),
    ):
        assert_clear(invoke(*arguments), 2, words)


def test_memory_that_is_too_small_is_told_in_figures(tmp_path: Path, model: str) -> None:
    file = write(tmp_path / "network.json", network(memory_gb=[0.001] * 3))
    assert_clear(invoke("plan", file, "--model", model), 1, "MB are missing")
