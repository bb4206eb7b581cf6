"""`swarmnode plan`: what it prints, and how it refuses."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from swarmnode.compute import expert_slots
from swarmnode.compute.capacity.capacity import limit_bytes_for, unit_sizes
from swarmnode.compute.expert_slots import buffer_bytes
from swarmnode.config import StageConfig
from swarmnode.founding.model_source import outline
from swarmnode.plan.offline.grid import MicrobatchTraffic, Problem
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.simulate.environment.model import load_model
from tests.cli.command import assert_clear, invoke, swarmnode
from tests.compute.model.llama_gguf import save_moe_gguf
from tests.compute.packing.test_packed_weight import needs_ggml
from tests.simulate.results.page_parser import ParsedPage

SIZES = ("--activation-gb", "0.2", "--gradient-gb", "0.5")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}

MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
}


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """Two machines of four devices, and a slower one of two."""
    machine = np.repeat([0, 1, 2], [4, 4, 2])
    together = machine[:, None] == machine
    return write(
        tmp_path / "home.json",
        devices=10,
        name="home",
        region=[f"room {number}" for number in machine],
        delay_ms=np.where(together, 0, 20).tolist(),
        bandwidth_gbps=np.where(together, 10, 0.1).tolist(),
        gpu=["RTX 3090"] * 8 + ["RTX 3060"] * 2,
    )


def write(file: Path, **values: Any) -> Path:
    file.write_text(json.dumps(values))
    return file


def plan(network: Path, *arguments: str) -> dict[str, Any]:
    done = invoke("plan", str(network), *arguments, "--json")
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_the_plan_as_json(network: Path) -> None:
    value = plan(network, "--stages", "2", "--replicas", "4", *SIZES, "--seconds", "1")
    assert list(value) == ["scenario", "cost_s", "data_parallel_s", "pipeline_s", "pipelines", "seconds"]
    assert value["scenario"] == "home" and value["seconds"] > 0
    grid = np.array(value["pipelines"]).T
    problem = Problem.on(Scenario.load(network), stages=2, replicas=4, traffic=MicrobatchTraffic(0.2e9, 0.5e9))
    cost = problem.cost(grid)
    assert (value["data_parallel_s"], value["pipeline_s"]) == (cost.data_parallel_s, cost.pipeline_s)
    assert value["cost_s"] == cost.total_s == pytest.approx(6 * 0.1 + 2 * (0.02 + 16), rel=1e-9)
    assert set(grid[0].tolist()) in ({0, 1, 2, 3}, {4, 5, 6, 7}), "each stage averages inside a machine"


def test_the_same_seed_gives_the_same_plan(network: Path) -> None:
    arguments = ("--stages", "3", "--replicas", "3", *SIZES, "--seed", "5")
    first, again = plan(network, *arguments), plan(network, *arguments)
    assert {**first, "seconds": 0} == {**again, "seconds": 0}


def test_the_clock_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by a clock that goes on by 20 ms whenever somebody looks, so that it is the same on every machine."""
    looks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 0.02 * next(looks))
    monkeypatch.setattr("swarmnode.terminal.progress.time", clock)
    random = np.random.default_rng(0)
    matrix = random.uniform(0.1, 1.0, (200, 200)).tolist()
    large = write(tmp_path / "large.json", devices=200, delay_ms=matrix, bandwidth_gbps=matrix)
    value = plan(large, "--stages", "10", "--replicas", "20", *SIZES, "--seconds", "2")
    assert 1.8 < value["seconds"] <= 2


def test_the_plan_as_a_table(network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    done = swarmnode(
        "plan", str(network), "--stages", "2", "--replicas", "4", *SIZES, "--seconds", "0.5", home=tmp_path
    )
    assert done.returncode == 0, done.stderr
    for words in ("home: 32.640 s of traffic in a step", "pipeline", "0 room 0", "2 of 10 devices are not used"):
        assert words in " ".join(done.stdout.split())
    assert done.stderr == ""


def test_a_model_on_unequal_cards(network: Path, tmp_path: Path) -> None:
    config = write(tmp_path / "config.json", **LLAMA)
    value = plan(network, "--model", str(config), "--stages", "4", "--replicas", "2", "--seconds", "1")
    held = [unit for stage in value["stages"] for unit in range(*stage["units"])]
    assert held == list(range(12)), "embedding, ten layers, head"
    assert [layer for stage in value["stages"] for layer in stage["layers"]] == list(range(10))
    assert value["activation_gb"] == pytest.approx(1024 * 256 * 2 / 1e9)
    attention, mlp, norms = 4 * 256**2, 3 * 256 * 1024, 2 * 256
    embedding, final_norm = 1000 * 256, 256
    parameters = 10 * (attention + mlp + norms) + 2 * embedding + final_norm
    assert sum(stage["gradient_gb"] for stage in value["stages"]) == pytest.approx(parameters * 2 / 1e9)
    assert sum(stage["memory_gb"] for stage in value["stages"]) == pytest.approx(parameters * 16 / 1e9)
    devices = [device for stage in value["stages"] for device in stage["devices"]]
    assert sorted(devices + value["unused"]) == list(range(10))


def test_a_model_as_a_table(network: Path, tmp_path: Path) -> None:
    write(tmp_path / "config.json", **LLAMA)
    done = invoke("plan", str(network), "--model", str(tmp_path), "--stages", "2", "--seconds", "1")
    text = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stderr
    for words in ("for a step of 32 microbatches", "embedding", "layers", "head", "RTX 3090"):
        assert words in text


@pytest.mark.parametrize(
    "arguments, asked, fewer",
    [(("--replicas", "1"), 2, 12), (("--replicas", "2"), 2, 0), (("--replicas", "2", "--holders", "3"), 3, 12)],
)
def test_units_with_fewer_holders_than_asked_are_told(
    network: Path, tmp_path: Path, arguments: tuple[str, ...], asked: int, fewer: int
) -> None:
    write(tmp_path / "config.json", **LLAMA)
    asked_for = ("--model", str(tmp_path), "--stages", "2", *arguments, "--seconds", "1")
    value = plan(network, *asked_for)
    assert (value["holders"], value["units_with_fewer"]) == (asked, fewer)
    text = " ".join(invoke("plan", str(network), *asked_for).stdout.split())
    assert (f"12 of 12 layers have fewer than {asked} holders" in text) == (fewer > 0)


def test_whether_experts_should_be_shared_is_told(network: Path, tmp_path: Path) -> None:
    write(tmp_path / "config.json", **MIXTURE)
    asked = ("plan", str(network), "--model", str(tmp_path), "--stages", "2", "--seconds", "1")
    groups = json.loads(invoke(*asked, "--json").stdout)["expert_groups"]
    assert [group["work"].split()[0] for group in groups] == ["training", "prompts", "decoding"]
    shown = " ".join(invoke(*asked).stdout.split())
    for group in groups:
        assert f"Experts: {group['says']}." in shown
        others = [group[name] for name in ("pipeline_s", "alone_s") if group[name] is not None]
        ratio = group["group_s"] / min(others)
        assert "at 10 Gbit/s" in group["says"], "the four devices of a machine are nearest"
        assert not group["group"] and f"is {ratio:.3g} times faster" in group["says"]
    write(tmp_path / "config.json", **{**MIXTURE, "num_experts_per_tok": 9})
    assert_clear(invoke(*asked), 2, "9 experts are active in a token, but a layer has 8")
    write(tmp_path / "config.json", **LLAMA)
    assert "expert_groups" not in json.loads(invoke(*asked, "--json").stdout)


@needs_ggml
@pytest.mark.parametrize("trains", [True, False])
def test_a_mixture_larger_than_a_machines_memory_is_told_as_by_fit(
    trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each figure by arithmetic, also if no machine could train the model. Nothing is said of a machine that holds all experts, or
    not those of one token."""
    monkeypatch.setattr(expert_slots, "PIECE_BYTES", 2 * expert_slots.PAGE)  # buffers smaller than the tiny model
    model = tmp_path / "tiny.gguf"
    save_moe_gguf(model, form="Q8_0", experts=16, width=2, used=2)
    sizes = unit_sizes(outline(str(model), tmp_path)[0], dtype=torch.float32, keeps_packed=True)  # type: ignore[arg-type]
    expert_bytes, layer_bytes = 3 * 128 * 256 // 32 * 34, sizes.weight_bytes[1]

    def memory_for(slots: int) -> int:
        need_bytes = sizes.need_bytes(0, 4, StageConfig().cache_tokens) - 2 * (16 - slots) * expert_bytes
        return limit_bytes_for(need_bytes) + (buffer_bytes() if slots < 16 else 0) + 1000

    slots_of = {0: 2, 1: 5, 2: 15, 3: 16, 4: 1}
    memory_gb = [*(memory_for(slots) / 1e9 for slots in slots_of.values()), *([2] if trains else [])]
    count = len(memory_gb)
    network = write(
        tmp_path / "home.json",
        devices=count,
        name="home",
        region=["room"] * count,
        delay_ms=np.ones((count, count)).tolist(),
        bandwidth_gbps=np.ones((count, count)).tolist(),
        memory_gb=memory_gb,
        decode_units_per_s=[100] * count,
    )
    asked = ("plan", str(network), "--model", str(model), "--stages", "1", "--seconds", "1")
    if trains:
        found = {one["device"]: one for one in plan(network, *asked[2:])["experts_on_disk"]}
        assert {device: one["slots"] for device, one in found.items()} == {0: 2, 1: 5, 2: 15}
    done = invoke(*asked)
    assert done.returncode == (0 if trains else 1), done.stderr
    shown = " ".join((done.stdout + done.stderr).split())
    assert [int(number) for number in re.findall(r"Machine (\d) alone", shown)] == [0, 1, 2]
    read_rate = 2 * load_model(model, 1).layer_parameters * 100  # bytes/s of memory, in 16 bits
    for device in range(3):
        slots = slots_of[device]
        used_bytes = 2 * (layer_bytes - (16 - 2) * expert_bytes) + sizes.weight_bytes[-1]
        missed_bytes = 2 * 2 * (1 - (slots / 16) ** 0.5) * expert_bytes
        says = (
            f"2 layers of {layer_bytes / 1e6:.1f} MB: memory for {slots} of 16 experts a layer, about "
            f"{round(10 * (slots / 16) ** 0.5)} of 10 found there"
        )
        speed = 1 / (used_bytes / read_rate + missed_bytes / 1e9)
        assert f"Machine {device} alone, serving, packed: {says}, about {speed:.2g} tokens/s with a disk of 1" in shown
        memory = f"{memory_for(slots) / 1e6:.3f}MB"
        row = json.loads(invoke("fit", str(model), "--memory", memory, "--device", "cpu", "--json").stdout)[0]
        assert row["experts"]["says"].startswith(says)


def test_holders_are_weighed_by_the_model_alone(network: Path) -> None:
    done = invoke("plan", str(network), "--stages", "2", "--replicas", "4", *SIZES, "--holders", "1")
    assert_clear(done, 2, "--holders needs --model; without a model, --replicas has this role")


def test_a_page_shows_the_plan(network: Path, tmp_path: Path) -> None:
    write(tmp_path / "config.json", **LLAMA)
    file = tmp_path / "plan.html"
    for arguments in (("--model", str(tmp_path), "--stages", "2"), ("--stages", "2", "--replicas", "4", *SIZES)):
        done = invoke("plan", str(network), *arguments, "--seconds", "1", "--report", str(file))
        assert done.returncode == 0 and "Wrote" in done.stdout and "plan.html" in done.stdout
        page = ParsedPage(file.read_text())
        assert len(page.all("svg")) == 3, "map, matrix, legend"
        assert {"room 0", "room 1"} <= {word for words in page.words for word in (words, words[2:])}
    done = invoke("plan", str(network), *arguments, "--seconds", "1", "--report", str(file), "--json")
    assert json.loads(done.stdout)["scenario"] == "home", "nothing but the plan"


def test_a_model_that_does_not_fit(network: Path, tmp_path: Path) -> None:
    config = write(tmp_path / "config.json", **{**LLAMA, "hidden_size": 16384, "intermediate_size": 65536})
    done = invoke("plan", str(network), "--model", str(config), "--seconds", "1")
    assert_clear(done, 1, "GB are missing")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--stages", "4", "--replicas", "4", *SIZES), "need 16 devices; home has 10"),
        (("--stages", "4"), "give --stages, --replicas, --activation-gb and --gradient-gb, or --model"),
        (("--model", "x", "--activation-gb", "1"), "follow from --model"),
        (("--model", "/none"), "no such file"),
        (("--report", "/no/such/folder/plan.html", "--stages", "4"), "no such folder"),
        (("--model", "x", "--dtype", "int3"), "--dtype int3: choose one of fp32, bf16, fp16"),
        (("--model", "x", "--gpu", "Voodoo"), "--gpu Voodoo: this GPU is unknown; choose one of"),
    ],
)
def test_refusals(network: Path, arguments: tuple[str, ...], words: str) -> None:
    assert_clear(invoke("plan", str(network), *arguments), 2, words)


@pytest.mark.parametrize("value", ["nan", "-1", "x"])
def test_sizes_that_are_none(network: Path, value: str) -> None:
    done = invoke("plan", str(network), "--stages", "2", "--replicas", "2", "--activation-gb", value)
    assert done.returncode == 2
    assert "--activation-gb" in done.stderr


def test_a_scenario_that_is_none(tmp_path: Path) -> None:
    file = write(tmp_path / "bad.json", devices=2, delay_ms=[[0, 1], [1, 0]], bandwidth_gbps=[[0, 0], [0, 0]])
    done = invoke("plan", str(file), "--stages", "1", "--replicas", "2", *SIZES)
    assert_clear(done, 2, "bad.json: bandwidth_gbps[0][1] is 0")
