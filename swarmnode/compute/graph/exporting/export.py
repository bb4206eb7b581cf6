"""Export: what a module does with an example batch becomes a graph. Only here, at the founder's, the module's code runs.

torch.export traces the module in training mode, or in evaluation mode for a swarm that serves it; what it writes in place is
made functional, and operators that torch can differentiate as they are stay whole. Batch norms are put back together, since
their functional form has no derivative.
"""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.compute.graph.exporting.complaint import FailedCall, complaint
from swarmnode.compute.graph.exporting.reader import Exported, read_program
from swarmnode.compute.graph.graph import BUFFER, Graph
from swarmnode.compute.graph.operators import is_random
from swarmnode.errors import UsageError

Example = Mapping[str, Tensor] | tuple[Tensor, ...]

_NO_GRAD = "wrap_with_set_grad_enabled"
OUTPUT = "output"  # of a module that returns one tensor


class Loss(nn.Module):
    """A module that returns its loss only."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Tensor:
        output = self.module(*args, **kwargs)
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if loss is None and isinstance(output, tuple | list) and output:
            loss = output[0]
        if loss is None and isinstance(output, Mapping):
            loss = output.get("loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(output).__name__
            raise UsageError(
                f"{type(self.module).__name__} returned {what} for the example batch: its forward must give the mean loss "
                "(a scalar, an output with .loss, or a tuple that begins with it); the labels belong to the batch"
            )
        return loss


class Outputs(nn.Module):
    """A module that returns its tensors by name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        output = self.module(*args, **kwargs)
        named = dict(_named(output, "", type(self.module).__name__))
        if not named:
            raise UsageError(f"{type(self.module).__name__} returned no tensor for the example batch")
        return named


def _named(value: Any, name: str, module: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in what a module returned: keys and numbers lead to them, as in "hidden_states_2"."""
    if isinstance(value, Tensor):
        yield name or OUTPUT, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{name}_{key}" if name else str(key), module)
    elif isinstance(value, tuple | list):
        keys = getattr(value, "_fields", range(len(value)))
        for key, item in zip(keys, value, strict=True):
            yield from _named(item, f"{name or (OUTPUT if isinstance(key, int) else '')}_{key}".strip("_"), module)
    elif value is not None:
        raise UsageError(f"{module} returned {type(value).__name__} {name}: only tensors can be the outputs of a graph")


def export_module(module: nn.Module, example: Example, *, any_batch: bool = True, trains: bool = True) -> Exported:
    """What the module computes, for any batch where it can be. Where it `trains` its forward gives the mean loss of the batch:
    a scalar, an output with `.loss`, or a tuple that begins with it. Else it gives tensors: one, or several by name or in a row.
    Without `any_batch`: for the example's batch only.

    Raises UsageError, naming operator and source line, where the module does something that a graph cannot hold.
    """
    args, kwargs = _check_example(module, example)
    was_training = module.training
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one operator for a whole layer, that no graph may use
    try:
        exported = _export(module.train(trains), args, kwargs, any_batch)
    finally:
        module.train(was_training)
        torch.backends.mha.set_fastpath_enabled(fast_path)
    if not trains:
        _check_served(type(module).__name__, exported.graph)
    return exported


def _check_served(module: str, graph: Graph) -> None:
    """Two peers must give one answer, and remember nothing of it. Raises UsageError."""
    drawing = next((node for node in graph.nodes if is_random(node.operator, node.args)), None)
    if drawing is not None:
        raise UsageError(
            f"{module} draws random numbers ({drawing.operator}) in evaluation mode, so no two machines would answer alike; "
            "a program must be exported after module.eval()"
        )
    if graph.moves or any(weight.kind == BUFFER for weight in graph.weights):
        raise UsageError(
            f"{module} changes its buffers in evaluation mode, and what is served remembers nothing; "
            "a program must be exported after module.eval()"
        )


def _check_example(module: nn.Module, example: Example) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Arguments of the module, by their names where they have any, so that the data can name them too."""
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    named = [
        parameter.name
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if 0 < len(args) <= len(named):
        args, kwargs = (), dict(zip(named, args, strict=False))
    values = (*args, *kwargs.values())
    if not values or not all(isinstance(value, Tensor) for value in values):
        raise UsageError("the example batch must be a tuple of tensors, or a dict of tensors by argument name")
    return args, kwargs


def _export(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], any_batch: bool) -> Exported:
    """With a batch of any size where the module takes one, else with the example's."""
    values = (*args, *kwargs.values())
    results = Loss(module) if module.training else Outputs(module)
    batch = next((value.shape[0] for value in values if value.dim()), 1)

    def free(value: Tensor) -> dict[int, Any]:
        return {0: torch.export.Dim.AUTO} if value.dim() and value.shape[0] == batch else {}

    if any_batch and batch > 1:
        shapes = (tuple(map(free, args)), {name: free(kwargs[name]) for name in kwargs})
        with suppress(Exception):  # the second attempt says what is wrong, if it is not the batch
            return read_program(module, _trace(results, args, kwargs, shapes))
    failed = FailedCall()
    try:
        with failed:
            program = _trace(results, args, kwargs, None)
    except UsageError:
        raise
    except Exception as error:  # whatever the module's own code or torch raises
        raise UsageError(complaint(error, failed)) from error
    return read_program(module, program)


def _trace(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], shapes: Any) -> Any:
    """An ExportedProgram of functional operators."""
    # copies, since torch marks sizes at the tensors, and takes one tensor under two names for one input
    example = (tuple(map(torch.clone, args)), {name: value.clone() for name, value in kwargs.items()})
    with _quiet():
        return _functional(torch.export.export(module, example, dynamic_shapes=shapes, strict=False))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch prints about its troubles: whole graphs, and hints that speak of its insides."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    was_disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = was_disabled


def _functional(program: Any) -> Any:
    """Without writes in place; what ran without gradients is detached, which the rewriting would forget."""
    module = program.graph_module
    _open_no_grad(module)
    (outputs,) = module.graph.find_nodes(op="output")[0].args
    for spec, output in zip(program.graph_signature.output_specs, outputs, strict=True):
        spec.arg.name = output.name
    return program.run_decompositions({})


def _open_no_grad(module: Any) -> None:
    """Put the content of no_grad regions into the graph around them, and detach what comes out."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or getattr(node.target, "_name", "") != _NO_GRAD:
            continue
        enabled, inner, *operands = node.args
        region = getattr(module, inner.target)
        _open_no_grad(region)
        with graph.inserting_before(node):
            placeholders = [inside for inside in region.graph.nodes if inside.op == "placeholder"]
            outputs = graph.graph_copy(region.graph, dict(zip(placeholders, operands, strict=True)))
            outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
            if not enabled:
                outputs = [graph.call_function(torch.ops.aten.detach.default, (output,)) for output in outputs]
        for user in list(node.users):
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()
