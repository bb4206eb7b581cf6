"""Cuts: at narrow places, balanced, deterministic, and never through what must stay together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from swarmnode.compute.graph.boundary import Layout
from swarmnode.compute.graph.costs.estimate import estimate_units, type_bytes
from swarmnode.compute.graph.costs.rates import REFERENCE
from swarmnode.compute.graph.exporting.module_export import export_module
from swarmnode.compute.graph.partition import balance, crossing_bytes, partition
from swarmnode.compute.graph.serialise import encode_graph, read_graph
from tests.compute.graph.models import BLOCKS, batch_of, build


class Repeated(nn.Module):
    """The same layer four times."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.layer, self.after = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for _ in range(4):
            x = torch.tanh(self.layer(x))
        return self.after(x).square().mean()


def test_resnet_is_cut_between_its_blocks(folder: Callable[[str], Path]) -> None:
    graph = read_graph(folder("resnet"))
    layout = Layout(graph)
    assert 0.7 * sum(BLOCKS) <= graph.units <= sum(BLOCKS) + 2  # small blocks go together; a stem and a head
    assert all(len(boundary) == 1 for boundary in layout.boundaries[:-1])  # hidden values, no half blocks
    blocks = {weight.tensor.rpartition(".layer.")[0]: set() for weight in graph.weights if ".layer." in weight.tensor}
    for number, unit in enumerate(layout.units):
        for weight in graph.weights:
            if weight.name in unit.weights and ".layer." in weight.tensor:
                blocks[weight.tensor.rpartition(".layer.")[0]].add(number)
    assert len(blocks) == sum(BLOCKS) and all(len(units) == 1 for units in blocks.values())


def test_skips_are_carried_over_units(folder: Callable[[str], Path]) -> None:
    graph = read_graph(folder("unet"))
    layout = Layout(graph)
    assert max(len(boundary) for boundary in layout.boundaries) >= 4  # two inputs, a skip, the hidden value
    inner = layout.boundaries[1:-1]
    assert any(value.trained and value in after for before, after in pairwise(inner) for value in before)


def test_weights_used_again_and_again_stay_in_one_unit() -> None:
    cut = partition(export_module(Repeated(), (torch.zeros(4, 32),)).graph)
    layout = Layout(cut.graph)
    assert [sum("layer" in name for name in unit.weights) for unit in layout.units].count(2) == 1
    (remark,) = cut.remarks
    assert remark.startswith("layer.weight is used all over") and remark.endswith("stays in one layer")


def test_tied_weights_are_told(folder: Callable[[str], Path]) -> None:
    cut = partition(export_module(build("gpt2"), batch_of("gpt2", 4)).graph)
    assert cut.remarks == ("transformer.wte.weight is shared by the first and the last layer",)
    assert encode_graph(cut.graph) == encode_graph(read_graph(folder("gpt2")))  # deterministic


def test_crossing_bytes_are_those_of_the_boundaries(folder: Callable[[str], Path]) -> None:
    graph = read_graph(folder("unet"))
    crossing = crossing_bytes(graph)
    estimated = [unit.boundary_bytes for unit in estimate_units(graph)]
    labels_bytes = sum(type_bytes(label.type, graph.batch) for label in Layout(graph).labels)
    assert labels_bytes > 0
    assert [crossing[cut] - labels_bytes for cut in graph.cuts] == estimated[1:]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_take_about_the_same_time(folder: Callable[[str], Path], stages: int) -> None:
    units = estimate_units(read_graph(folder("resnet")))
    seconds = [unit.seconds(REFERENCE) for unit in units]
    cuts = balance(seconds, [unit.boundary_bytes for unit in units], stages)
    assert len(cuts) == stages - 1
    bounds = [0, *cuts, len(units)]
    slowest = max(sum(seconds[start:end]) for start, end in pairwise(bounds))
    assert slowest <= sum(seconds) / stages + max(seconds)


def test_balance_is_the_best_there_is() -> None:
    assert balance([1, 1, 1, 1], [0, 0, 0, 0], 2) == [2]
    assert balance([4, 1, 1, 1], [0, 0, 0, 0], 2) == [1]
    assert balance([2, 2, 2, 2], [0, 9, 9, 0], 2, bytes_per_s=1) == [3]  # two slow links are avoided
    with pytest.raises(ValueError, match="2 layers cannot be cut into 3 stages"):
        balance([1, 1], [0, 0], 3)
