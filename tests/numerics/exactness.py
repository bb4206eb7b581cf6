"""A module's own loss and gradients beside those of its graph, in stages: what a swarm would compute, without the swarm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import pairwise

import torch
from torch import Tensor, nn

from swarmnode.compute.graph.exporting.gradient_check import Loss, SameDraws, check_gradients, untouched
from swarmnode.compute.graph.exporting.module_export import check_example, export_module
from swarmnode.compute.graph.exporting.reader import Exported
from swarmnode.compute.graph.graph import is_random
from swarmnode.compute.graph.graph_segment import GraphSegment
from swarmnode.compute.graph.partition import partition
from swarmnode.compute.graph.serialise import decode_graph, encode_graph
from swarmnode.compute.training.saved_activations import Gradients, accumulate, leaves
from tests.compute.graph.models import split

EXACT = 2e-7  # of the loss, and of the gradient's norm over all parameters
ROUNDED = 1e-6  # of the largest parameter's gradient: what is summed in stages is rounded in another order
Batch = dict[str, Tensor]


def founded(module: nn.Module, batch: Batch) -> Exported:
    """The graph that a swarm would be founded on, as volunteers read it. Raises UsageError where it is refused."""
    exported = export_module(module, batch)
    assert not check_gradients(module.train(), *check_example(module, batch), exported)
    graph = partition(exported.graph).graph
    return Exported(decode_graph(encode_graph(graph)), exported.weights)


def check_stages(module: nn.Module, batch: Batch, exported: Exported, *stages: int) -> None:
    """Loss and gradients of the graph in so many stages are the module's own."""
    draws = any(is_random(node.operator, node.args) for node in exported.graph.nodes)
    with untouched(module), SameDraws() if draws else nullcontext():
        loss = Loss(module)((), batch)
        parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        for parameter in parameters.values():
            parameter.grad = None
        loss.backward()
        wanted = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    for number in stages:
        with SameDraws() if draws else nullcontext():
            found_loss, found = _in_stages(exported, batch, number)
        assert abs(found_loss - loss.item()) <= EXACT * max(1.0, abs(loss.item()))
        _check_gradients(parameters, wanted, found)


def _check_gradients(
    parameters: Mapping[str, Tensor], wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> None:
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    squares = dict.fromkeys(wanted.keys() | found.keys(), 0.0)
    for name in squares:
        own = wanted.get(name, torch.zeros_like(parameters[name])).to_dense()
        squares[name] = float((found.get(name, torch.zeros_like(own)) - own).square().sum())
        assert math.sqrt(squares[name]) <= ROUNDED * largest, name
    norm = math.hypot(*(float(gradient.norm()) for gradient in wanted.values()))
    assert math.sqrt(sum(squares.values())) <= EXACT * norm


def _in_stages(exported: Exported, batch: Batch, stages: int) -> tuple[float, Mapping[str, Tensor]]:
    graph = exported.graph
    cuts = sorted({round(graph.units * stage / stages) for stage in range(stages + 1)})
    values, labels = split(graph, batch)
    passed, sums = [], dict[str, Tensor]()
    for start, end in pairwise(cuts):
        weights = {name: tensor.clone() for name, tensor in exported.weights.items()}
        segment = GraphSegment(graph, weights, start, end, counts_dropout=False)
        inputs = leaves(values, start)
        outputs = segment.forward(inputs, start, end, 0, labels if end == graph.units else ())
        passed.append((segment, inputs, outputs))
        values = tuple(output.detach() for output in outputs)
    gradients: Gradients = (torch.ones_like(values[0]),)
    for segment, inputs, outputs in reversed(passed):
        gradients = accumulate(outputs, gradients, inputs)
        for named in segment.parameters().values():
            for name, parameter in named.items():
                if parameter.grad is not None:
                    sums[name] = sums.get(name, 0) + parameter.grad
    return values[0].item(), sums
