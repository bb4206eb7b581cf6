"""Graphs of modules are planned and simulated as models are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarmnode.compute.graph.boundary import Layout
from swarmnode.compute.graph.exporting.module_export import export_module
from swarmnode.compute.graph.serialise import GraphCheckpoint, read_graph, write_graph
from swarmnode.config import StageConfig
from swarmnode.errors import UsageError
from swarmnode.measuring.hardware import Hardware
from swarmnode.simulate.environment.model import GraphModel, load_model
from swarmnode.swarm.records.announcement import StepLoad
from swarmnode.training.organisation import SAMPLES, training_load
from tests.cli.command import assert_clear, invoke

BATCH = 8
DEVICES = 6


@pytest.fixture
def network(tmp_path: Path) -> str:
    """Cards so slow that more of them are worth their links."""
    values: dict[str, Any] = {
        "name": "lan",
        "devices": DEVICES,
        "delay_ms": (0.1 * (1 - np.eye(DEVICES))).tolist(),
        "bandwidth_gbps": [[1] * DEVICES] * DEVICES,
        "peak_tflops": [0.05] * DEVICES,
        "memory_gb": [8] * DEVICES,
    }
    path = tmp_path / "lan.json"
    path.write_text(json.dumps(values))
    return str(path)


@pytest.mark.parametrize("kind", ["resnet", "unet"])
def test_a_plan_is_carried_out_as_fast_as_it_says(
    folder: Callable[[str], Path], network: str, tmp_path: Path, kind: str
) -> None:
    path = folder(kind)
    common = (network, "--model", str(path), "--batch", str(BATCH), "--microbatches", "12")
    done = invoke("plan", *common, "--stages", "3", "--replicas", "2", "--dtype", "fp32", "--seconds", "0.5", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    graph = read_graph(path)
    spans = [stage["units"] for stage in plan["stages"]]
    assert [unit for span in spans for unit in range(*span)] == list(range(graph.units))
    assert all(stage["layers"] == [] for stage in plan["stages"]), "a module has no embedding and no head"

    file = tmp_path / "plan.json"
    file.write_text(done.stdout)
    lived = invoke(
        "plan",
        "simulate",
        *common,
        "--workload",
        "train",
        "--compress",
        "none",
        "--plan",
        str(file),
        "--hours",
        "0.002",
        "--json",
    )
    assert lived.returncode == 0, lived.stderr
    figures = json.loads(lived.stdout)
    assert figures["samples_per_s"] > 0 and figures["totals"]["samples trained"] > 0, "a module has no tokens"
    step = figures["latencies"]["step, s"]
    assert step["mean"] == pytest.approx(plan["step_s"], rel=0.25), "the plan knows what crosses, and what is computed"


def test_what_passes_between_units_is_what_the_graph_says(folder: Callable[[str], Path]) -> None:
    """A U-Net's boundaries differ: skips pass by. The clean image goes straight to the loss."""
    graph = read_graph(folder("unet"))
    model = GraphModel.of_graph(graph, "unet", BATCH)
    image_values = 3 * 32 * 32
    assert model.input_bytes(BATCH, 1) == BATCH * image_values * 4
    for unit, values in enumerate(Layout(graph).boundaries[: graph.units]):
        sizes = {back: np.prod(model.crossing(unit, BATCH, 1, back=back)) for back in (False, True)}
        there = sum(int(np.prod(value.type.sizes(BATCH))) for value in values)
        back = sum(int(np.prod(value.type.sizes(BATCH))) for value in values if value.trained)
        assert sizes == {False: there, True: max(back, BATCH)}
    assert len(set(model.forward_bytes[1:])) > 1
    assert sum(model.parameters) == sum(np.prod(weight.type.sizes(1)) for weight in graph.weights if weight.trained)


def test_a_cut_where_little_crosses_is_preferred(folder: Callable[[str], Path]) -> None:
    """Over slow links the plan cuts a ResNet late, where images have become small."""
    model = load_model(folder("resnet"), BATCH)
    assert isinstance(model, GraphModel)
    assert model.forward_bytes[1] > 2 * model.forward_bytes[-1]


def test_what_cannot_be_planned_is_refused(folder: Callable[[str], Path], network: str, tmp_path: Path) -> None:
    path = str(folder("unet"))
    assert_clear(invoke("plan", "simulate", network, "--model", path), 2, "simulated in training: add --workload train")
    assert_clear(invoke("plan", network, "--model", "tests.compute.graph.models:nothing"), 2, "no function nothing")
    assert_clear(invoke("plan", network, "--model", str(tmp_path / "none.pt2")), 2, "none.pt2: cannot be read")
    (tmp_path / "graph.json").write_text("{}")
    assert_clear(invoke("plan", network, "--model", str(tmp_path)), 1, "the graph is damaged")


def test_a_graph_of_one_batch_size_says_so(folder: Callable[[str], Path]) -> None:
    import msgspec

    graph = msgspec.structs.replace(read_graph(folder("unet")), any_batch=False)
    with pytest.raises(UsageError, match="microbatches of 4 samples alone, not 8: see --batch"):
        GraphModel.of_graph(graph, "unet", BATCH)


@pytest.mark.parametrize("kind", ["resnet", "unet"])
def test_nodes_and_simulated_peers_know_alike_what_passes_between_units(
    folder: Callable[[str], Path], kind: str
) -> None:
    checkpoint = GraphCheckpoint(folder(kind))
    hardware = Hardware.probe(checkpoint, StageConfig(), trains=True)
    model = GraphModel.of_graph(checkpoint.graph, kind, BATCH)
    between = sorted(size_bytes // BATCH for size_bytes in model.forward_bytes[1:])
    assert hardware.width == model.hidden == between[len(between) // 2] // 4
    assert training_load(hardware, StepLoad(1, SAMPLES, 4000)).activation_bytes == SAMPLES * between[len(between) // 2]


@pytest.mark.parametrize("own", ["float32", "bfloat16"])
def test_a_module_takes_the_dtype_that_it_computes_in(tmp_path: Path, own: str) -> None:
    module, x = torch.nn.Linear(4, 4).to(getattr(torch, own)), torch.zeros(2, 4, dtype=getattr(torch, own))
    write_graph(export_module(module, (x,), trains=False), tmp_path)
    checkpoint = GraphCheckpoint(tmp_path)
    for dtype in ("auto", "float32", "float16", "bfloat16"):
        config = StageConfig(dtype=dtype)
        if dtype in ("auto", own):
            assert Hardware.probe(checkpoint, config).capacity_units == 1
        else:
            with pytest.raises(UsageError, match=f"this model computes in {own}"):
                Hardware.probe(checkpoint, config)
