"""A graph in pieces trains as the module itself does in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from swarmnode.codec.body import SHARED
from swarmnode.compute.graph.boundary import Layout
from swarmnode.compute.graph.costs.estimate import estimate_units
from swarmnode.compute.graph.costs.rates import REFERENCE
from swarmnode.compute.graph.exporting.module_export import export_module
from swarmnode.compute.graph.graph import ASSERT, grouped_product
from swarmnode.compute.graph.graph_segment import GraphSegment, load_segment
from swarmnode.compute.graph.partition import balance, partition
from swarmnode.compute.graph.serialise import read_graph
from swarmnode.compute.training.datasets.batches import Microbatch
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.segment import Values
from swarmnode.errors import CheckpointError, NotFinite, ProtocolError
from swarmnode.swarm.records.run import Run
from tests.compute.graph.models import Awkward, batch_of, build, loss_of, split

KINDS = ("awkward", "unet", "gpt2", "resnet")
SAMPLES = 3  # not those of the export
RUN = Run(data=bytes(32), steps=4, batch=2 * SAMPLES, microbatch=SAMPLES, clip=0.0, optimizer="sgd", learning_rate=0.1)


def stages_of(folder: Path, stages: int, *, recompute: bool = False) -> list[Learner]:
    graph = read_graph(folder)
    units = estimate_units(graph)
    starts = balance([unit.seconds(REFERENCE) for unit in units], [unit.boundary_bytes for unit in units], stages)
    cuts = pairwise([0, *starts, graph.units])
    return [Learner(load_segment(folder, start, end), RUN, recompute=recompute) for start, end in cuts]


def train(learners: list[Learner], lease: int, index: int, microbatch: Microbatch) -> float:
    """One microbatch through all stages and back, as it comes over links: contiguous copies."""
    values, labels = microbatch
    for learner in learners:
        values = tuple(value.clone(memory_format=torch.contiguous_format) for value in values)
        values = learner.forward(lease, index, learner.segment.start, learner.segment.end, values, labels)
    gradients: tuple[Tensor | None, ...] = ()
    for learner in reversed(learners):
        gradients = learner.backward(lease, gradients)
    return values[0].item()


def gradients_of(learners: list[Learner]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for learner in learners:
        for named in learner.segment.parameters().values():
            for name, parameter in named.items():
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                sums[name] = sums[name] + own if name in sums else own.clone()
    return sums


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_split_graphs_train_as_the_module(folder: Callable[[str], Path], kind: str, stages: int) -> None:
    module, graph = build(kind), read_graph(folder(kind))
    learners = stages_of(folder(kind), stages, recompute=stages == 2)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for index in range(RUN.microbatches):
        batch = batch_of(kind, SAMPLES, seed=index)
        loss = loss_of(module, batch)
        (loss / RUN.microbatches).backward()
        module.load_state_dict(buffers, strict=False)  # a learner moves statistics when the step commits
        assert train(learners, index, index, split(graph, batch)) == pytest.approx(loss.item(), abs=1e-5)
    own = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad}
    found = gradients_of(learners)
    assert found.keys() == own.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ["awkward", "resnet"])
def test_a_single_pass_is_exact_and_moves_the_same_statistics(folder: Callable[[str], Path], kind: str) -> None:
    module = build(kind)
    batch = batch_of(kind, SAMPLES)
    loss = loss_of(module, batch)
    loss.backward()
    graph = read_graph(folder(kind))
    segment = load_segment(folder(kind), 0, graph.units)
    inputs, labels = split(graph, batch)
    (own,) = segment.forward(inputs, 0, graph.units, 0, labels)
    own.backward()
    assert own.item() == loss.item()
    wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
    for named in segment.parameters().values():
        for name, parameter in named.items():
            torch.testing.assert_close(parameter.grad, wanted[name], msg=name)
    buffers = {name: buffer for named in segment.buffers().values() for name, buffer in named.items()}
    assert buffers and "scale" not in buffers
    for name, buffer in buffers.items():
        torch.testing.assert_close(buffer, dict(module.named_buffers())[name], msg=name)


def test_tied_weights_are_shared_by_the_ends(folder: Callable[[str], Path]) -> None:
    units = read_graph(folder("gpt2")).units
    for start, end, shares in ((0, 1, True), (1, units - 1, False), (units - 1, units, True)):
        segment = load_segment(folder("gpt2"), start, end)
        assert (SHARED in segment.parameters()) == shares
        assert not shares or list(segment.parameters()[SHARED]) == ["transformer.wte.weight"]


def test_dropout_depends_on_seed_and_unit_alone() -> None:
    exported = export_module(Awkward(dropout=0.5), batch_of("awkward", 4))
    graph = partition(exported.graph).graph
    values, labels = split(graph, batch_of("awkward", SAMPLES))

    def loss(seed: int, *, unit_by_unit: bool) -> float:
        segment = GraphSegment(graph, copy.deepcopy(exported.weights), 0, graph.units)
        step = 1 if unit_by_unit else graph.units
        passed: Values = values
        for unit in range(0, graph.units, step):
            torch.rand(unit + 1)  # someone else draws
            passed = segment.forward(passed, unit, unit + step, seed, labels)
        return passed[0].item()

    assert graph.units > 2
    assert loss(5, unit_by_unit=False) == loss(5, unit_by_unit=True) != loss(6, unit_by_unit=False)


def test_foreign_values_are_refused(folder: Callable[[str], Path]) -> None:
    segment = load_segment(folder("resnet"), 0, 2)
    image, label = batch_of("resnet", SAMPLES).values()
    for values, text in (
        ((image, label), "2 values at boundary 0"),
        ((image.long(),), "int64"),
        ((image[:, :2],), r"\(3, 2, 32, 32\)"),
        ((image[0],), r"\(3, 32, 32\)"),
    ):
        with pytest.raises(ProtocolError, match=text):
            segment.forward(values, 0, 2, seed=0)
    units = segment.units
    whole = load_segment(folder("resnet"), 0, units)
    for labels, text in (
        ((), "0 values among the labels"),
        ((label.float(),), "float32"),
        ((label[:2],), r"int64 \(2,\) among the labels, not \(3,\)"),
    ):
        with pytest.raises(ProtocolError, match=text):
            whole.forward((image,), 0, units, 0, labels)


def test_labels_that_do_not_exist_are_the_peers_fault(folder: Callable[[str], Path]) -> None:
    units = read_graph(folder("resnet")).units
    image, label = batch_of("resnet", SAMPLES).values()
    with pytest.raises(ProtocolError, match="cannot work with this batch"):
        load_segment(folder("resnet"), 0, units).forward((image,), 0, units, 0, (label + 1000,))


class Guarded(nn.Module):
    """Refuses large numbers, and looks for infinite ones."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if (x > 9).any():
            raise ValueError("too large")
        x = self.net(x)
        if x.isinf().any().item():
            x = x.clamp(-1, 1)
        return x.square().mean()


def test_what_a_module_takes_for_granted_is_looked_at_in_each_pass() -> None:
    exported = export_module(Guarded(), (torch.ones(2, 4),))
    assert exported.graph.any_batch
    assert [node.operator for node in exported.graph.nodes].count(ASSERT) == 2
    segment = GraphSegment(exported.graph, exported.weights, 0, 1)
    assert segment.forward((torch.ones(3, 4),), 0, 1, 0)[0].isfinite()
    with pytest.raises(ProtocolError, match="assumption of the module"):
        segment.forward((torch.full((3, 4), 10.0),), 0, 1, 0)
    learner = Learner(segment, RUN)
    with pytest.raises(NotFinite):
        learner.forward(0, 0, 0, 1, (torch.full((3, 4), -torch.inf),))


def test_weights_must_be_those_of_the_graph(folder: Callable[[str], Path]) -> None:
    graph = read_graph(folder("awkward"))
    weights = {weight.tensor: torch.zeros(2, 2) for weight in graph.weights}
    with pytest.raises(CheckpointError, match=r"is float32 \(2, 2\), but the graph has"):
        GraphSegment(graph, weights, 0, graph.units)


def test_a_segment_tells_what_it_is(folder: Callable[[str], Path]) -> None:
    units = read_graph(folder("awkward")).units
    assert repr(load_segment(folder("awkward"), 0, 1)) == f"GraphSegment([0:1) of {units} units on cpu)"


@pytest.mark.parametrize(("kind", "labels"), [("gpt2", "labels"), ("resnet", "labels"), ("unet", "clean")])
def test_what_the_last_unit_takes_of_the_inputs_crosses_no_boundary(
    folder: Callable[[str], Path], kind: str, labels: str
) -> None:
    graph = read_graph(folder(kind))
    layout, inputs = Layout(graph), {item.name: item.argument for item in graph.inputs}
    assert [inputs[value.ref.name] for value in layout.labels] == [labels]
    crossing = {value.ref.name for boundary in layout.boundaries[1:] for value in boundary}
    assert not crossing & {value.ref.name for value in layout.labels}
    assert (crossing & inputs.keys() != set()) == (kind == "unet"), "its skip over all units"
    assert len(layout.boundaries[0]) == 1, "the first unit takes one input"


@pytest.mark.parametrize("width", [6, 8, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_groups_take_any_width_and_what_autocast_makes_of_rows(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(7, width, dtype=dtype, requires_grad=True)
    experts = torch.randn(2, width, width + 2, requires_grad=True)
    found = grouped_product(rows, experts, torch.tensor([3, 7], dtype=torch.int32))
    wanted = torch.cat([rows[:3].float() @ experts[0], rows[3:].float() @ experts[1]])
    torch.testing.assert_close(found, wanted)
    for given, own in zip(
        *(torch.autograd.grad(one.square().sum(), (rows, experts)) for one in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(given, own)


def test_eva_finds_the_layers_of_a_graph(folder: Callable[[str], Path]) -> None:
    run = msgspec.structs.replace(RUN, optimizer="eva", epsilon=0.03, clip=1e-3)
    graph = read_graph(folder("resnet"))
    learner = Learner(load_segment(folder("resnet"), 0, graph.units), run)
    train([learner], 0, 0, split(graph, batch_of("resnet", SAMPLES)))
    learner.commit({}, learner.squared_norm(learner.blocks) ** 0.5)
    states = {name: tensor for block in learner.blocks for name, tensor in learner.state(block).items()}
    means = {name for name in states if "/output_mean/" in name}
    assert {name for name in means if states[name].any()} == means
    assert any(states[name.replace("eva/output_mean", "parameter")].dim() == 4 for name in means), "convolutions"
