"""Estimates of the cost of units: work of the forward and backward pass, memory, bytes across boundaries. Nothing is computed.

Every kind of call is made once on fake tensors, forward and backward, and the operators that it dispatches are counted: a model's
blocks call the same operators with the same shapes.

Estimates for a causal language model's units, from its class and config alone: one training pass on fake tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from swarmnode.compute.graph.boundary import Layout, Value, trained_values, value_types
from swarmnode.compute.graph.costs.rates import (
    FRESH,
    PLAIN,
    REFERENCE,
    ComputeWork,
    Rates,
    WorkCounter,
    bytes_of,
    total,
)
from swarmnode.compute.graph.graph import (
    Argument,
    Graph,
    OperatorCall,
    Poly,
    Ref,
    TensorType,
    argument_value,
    resolve,
    torch_constant,
)
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.traced_model import FOREIGN_ERRORS
from swarmnode.compute.training.losses import next_token_loss
from swarmnode.errors import CheckpointError

FLOAT32_BYTES = 4
CALLS_KEPT = 4096  # of all graphs, some 2 KiB each; a large model has some hundred kinds


@dataclass(frozen=True)
class NodeEstimate:
    """Cost of one node. `saved_bytes` are the bytes of values that its backward pass needs, by the identity of their memory."""

    forward: ComputeWork
    backward: ComputeWork
    saved_bytes: dict[Any, int]


@dataclass(frozen=True)
class UnitEstimate:
    """Cost of one unit for a batch.

    The bytes are of activations kept for the backward pass, of trained parameters, and of the values that enter the unit.
    """

    forward: ComputeWork
    backward: ComputeWork
    activation_bytes: int
    parameter_bytes: int
    boundary_bytes: int

    def seconds(self, rates: Rates) -> float:
        """Return the seconds of the forward and the backward pass."""
        return rates.seconds(self.forward) + rates.seconds(self.backward)

    def learning_s(self, rates: Rates) -> float:
        """Return the seconds that a learner takes for a microbatch.

        These include writing kept activations into fresh memory, and adding gradients to the step's sums.
        """
        return self.seconds(rates) + rates.seconds(
            ComputeWork({FRESH: self.activation_bytes, PLAIN: 3 * self.parameter_bytes})
        )


def estimate_units(graph: Graph, batch: int | None = None) -> list[UnitEstimate]:
    """Estimate every unit for a batch of `batch` samples (default: the example's)."""
    batch = batch or graph.batch
    layout = Layout(graph)
    nodes = estimate_nodes(graph, batch)
    weights = {weight.name: weight for weight in graph.weights}
    estimates = []
    for unit, boundary in zip(layout.units, layout.boundaries, strict=False):
        own = [nodes[node.name] for node in unit.nodes]
        kept: dict[Any, int] = {}
        for node in own:
            kept.update(node.saved_bytes)
        estimates.append(
            UnitEstimate(
                forward=total(node.forward for node in own),
                backward=total(node.backward for node in own),
                activation_bytes=sum(kept.values()),
                parameter_bytes=sum(
                    type_bytes(weights[name].type, batch) for name in unit.weights if weights[name].trained
                ),
                boundary_bytes=values_bytes(boundary, batch),
            )
        )
    return estimates


def unit_weight_bytes(graph: Graph) -> tuple[int, ...]:
    """Return the bytes of all weights that each unit reads. A shared weight counts in each of its units."""
    sizes = {weight.name: type_bytes(weight.type, graph.batch) for weight in graph.weights}
    return tuple(sum(sizes[name] for name in unit.weights) for unit in Layout(graph).units)


def estimate_nodes(graph: Graph, batch: int) -> dict[str, NodeEstimate]:
    """Estimate the work of every operator of a graph on a batch of `batch` samples, by the operator's name."""
    estimator = _Estimator(graph, batch)
    return {node.name: estimator.estimate(node) for node in graph.nodes}


def type_bytes(kind: TensorType, batch: int) -> int:
    """Return the bytes of a value of this type, for a batch of `batch` samples."""
    size: int = torch_constant(kind.dtype).itemsize
    for length in kind.sizes(batch):
        size *= length
    return size


def values_bytes(values: Iterable[Value], batch: int) -> int:
    """Return the bytes of several values together, such as those that pass from one peer to the next."""
    return sum(type_bytes(value.type, batch) for value in values)


class _Estimator:
    def __init__(self, graph: Graph, batch: int) -> None:
        self.graph = graph
        self.batch = batch
        self.trained = trained_values(graph)
        self.weights = {Ref(weight.name) for weight in graph.weights}
        self.types = {Ref(name): kind for name, kind in graph.sources} | value_types(graph.nodes)
        self.storages: dict[Ref, Any] = {}  # value -> the value whose memory it is a view of
        self.seen: set[Ref] = set()

    def estimate(self, node: OperatorCall) -> NodeEstimate:
        refs = list(dict.fromkeys(node.refs()))
        cost = _estimate_call(msgspec.msgpack.encode(self._call(node, refs)))
        named = {memory: self.storages.get(ref, ref) for memory, ref in enumerate(refs)}
        for item, memory in enumerate(cost.outputs):
            if memory is not None:
                ref = Ref(node.name, item if len(cost.outputs) > 1 else None)
                self.storages[ref] = named.setdefault(memory, ref)
        kept = {named.get(memory, (node.name, memory)): size for memory, size in cost.saved_bytes.items()}
        kept = {key: size for key, size in kept.items() if key not in self.weights}
        # Gradients are added to existing ones: to a weight's accumulator, or to another user's of the same value.
        again = [ref for ref in refs if ref.name in self.trained and ref in self.seen | self.weights]
        self.seen |= set(refs)
        sums = ComputeWork({PLAIN: 3.0 * sum(type_bytes(self.types[ref], self.batch) for ref in again)})
        return NodeEstimate(cost.forward, cost.backward + sums, kept)

    def _call(self, node: OperatorCall, refs: list[Ref]) -> _Call:
        """Return the call of a node for this batch, with values numbered."""
        numbers = {ref: str(number) for number, ref in enumerate(refs)}

        def argument(value: Any) -> Any:
            if isinstance(value, list):
                return [argument(atom) for atom in value]
            if isinstance(value, Poly):
                return value.at(self.batch)
            return Ref(numbers[value]) if isinstance(value, Ref) else value

        kinds = [(self.types[ref], ref.name in self.trained) for ref in refs]
        inputs = tuple(_Input(kind.dtype, kind.sizes(self.batch), trained) for kind, trained in kinds)
        kwargs = {key: argument(value) for key, value in node.kwargs.items()}
        return _Call(node.operator, tuple(map(argument, node.args)), kwargs, inputs)


class _Input(msgspec.Struct, frozen=True):
    """Tensor argument of an operator: dtype, shape, and whether its gradient is wanted (`trained`)."""

    dtype: str
    sizes: tuple[int, ...]
    trained: bool


class _Call(msgspec.Struct, frozen=True):
    """Call of an operator on values without names: the name of a Ref is the number of the input."""

    operator: str
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    inputs: tuple[_Input, ...]


@dataclass(frozen=True)
class _CallEstimate:
    """Cost of a call. Memories are numbered, those of the inputs first.

    `outputs` holds the memory of each result, None for a result that is no tensor. `saved_bytes` holds the bytes that the
    backward pass needs in each memory.
    """

    forward: ComputeWork
    backward: ComputeWork
    outputs: tuple[int | None, ...]
    saved_bytes: dict[int, int]


def _grouped_product(left: Tensor, right: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """Return a product of as many numbers: torch knows the shapes of grouped products only in bfloat16."""
    if left.dim() == right.dim() == 2 and offs is not None:
        return (left @ right).expand(len(offs), -1, -1)
    if left.dim() != right.dim():
        left, right = (tensor if tensor.dim() == 2 else tensor[0] for tensor in (left, right))
    return left @ right


_AS_COSTLY: dict[str, Callable[..., Any]] = {"aten._grouped_mm.default": _grouped_product}


@lru_cache(maxsize=CALLS_KEPT)
def _estimate_call(encoded: bytes) -> _CallEstimate:
    """Estimate a `_Call`, given as bytes: unlike objects, these differ for 1, 1.0 and True."""
    call = msgspec.msgpack.decode(encoded, type=_Call)
    memories: dict[Any, int] = {}
    saved: list[Tensor] = []

    def memory(tensor: Tensor) -> int:
        return memories.setdefault(storage_of(tensor), len(memories))

    def record_saved(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def argument(value: Any) -> Any:
        if isinstance(value, list):
            return [argument(atom) for atom in value]
        return inputs[int(value.name)] if isinstance(value, Ref) else argument_value(value, torch.device("cpu"))

    with FakeTensorMode():
        inputs: list[Tensor] = []
        for one in call.inputs:
            tensor = torch.empty(one.sizes, dtype=torch_constant(one.dtype))
            inputs.append(tensor.requires_grad_(one.trained and tensor.is_floating_point()))
            memory(tensor)
        with WorkCounter() as forward, saved_tensors_hooks(record_saved, lambda tensor: tensor):
            kwargs = {key: argument(value) for key, value in call.kwargs.items()}
            function = _AS_COSTLY.get(call.operator) or resolve(call.operator)
            output = function(*map(argument, call.args), **kwargs)
        outputs = list(output) if isinstance(output, list | tuple) else [output]
        places = tuple(memory(item) if isinstance(item, Tensor) else None for item in outputs)
        kept = {memory(tensor): bytes_of(tensor) for tensor in saved}
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        roots = [tensor for tensor in outputs if isinstance(tensor, Tensor) and tensor.requires_grad]
        backward = WorkCounter()
        if roots and wanted:
            gradients = [torch.empty_like(root) for root in roots]
            with backward:
                torch.autograd.grad(roots, wanted, gradients, allow_unused=True)
        return _CallEstimate(forward.work, backward.work, places, kept)


def storage_of(tensor: Tensor) -> Any:
    """Return an identifier of a tensor's memory. Views share that of their source."""
    return tensor.untyped_storage()._cdata


def reference_seconds(estimates: Iterable[NodeEstimate]) -> list[float]:
    """Return the seconds, forward and backward, on a middling machine, for decisions that must not depend on this one."""
    return [REFERENCE.seconds(estimate.forward) + REFERENCE.seconds(estimate.backward) for estimate in estimates]


def forward_bytes(layout: Layout, start: int, end: int, batch: int) -> int:
    """Return an estimate of the most bytes that a pass of `batch` samples through units [start, end) takes, with its inputs.

    Every value counts as memory of its own, even a view of another one. So the estimate is too high rather than too low, except for
    the memory that operators use internally.
    """
    nodes = [node for unit in layout.units[start:end] for node in unit.nodes]
    sizes = {value.ref: type_bytes(value.type, batch) for value in layout.boundaries[start]}
    made = {ref: type_bytes(kind, batch) for ref, kind in value_types(nodes).items()}
    leaving = {value.ref for value in layout.boundaries[end]}
    last = {ref: number for number, node in enumerate(nodes) for ref in node.refs()}
    held = peak = sum(sizes.values())
    for number, node in enumerate(nodes):
        results = (
            [Ref(node.name)] if len(node.types) == 1 else [Ref(node.name, item) for item in range(len(node.types))]
        )
        for ref in results:
            sizes[ref] = made.get(ref, 0)
            held += sizes[ref]
        peak = max(peak, held)
        for ref in {ref for ref in (*node.refs(), *results) if last.get(ref, number) == number} - leaving:
            held -= sizes.pop(ref, 0)
    return peak


def entering_bytes(layout: Layout, samples: int, *, back: bool = False) -> tuple[int, ...]:
    """Return for each unit the bytes of the values that enter it, or with `back` of their gradients."""
    return tuple(
        values_bytes((value for value in values if value.trained or not back), samples)
        for values in layout.boundaries[: layout.graph.units]
    )


def usual_width(layout: Layout) -> int:
    """Return the number of float32 values of one sample that pass between two units, at the boundary of middle size.

    0 if there is only one unit.
    """
    samples = layout.graph.batch
    between = sorted(entering_bytes(layout, samples)[1:])
    return max(1, between[len(between) // 2] // (samples * FLOAT32_BYTES)) if between else 0


with lean():
    from transformers.initialization import no_init_weights


def estimate_span(checkpoint: Checkpoint, batch: int, sequence: int) -> list[UnitEstimate]:
    """Estimate all units (embedding, layers, head) for a microbatch in float32.

    Raises CheckpointError for models whose own code needs real numbers, as some mixtures of experts do.
    """
    try:
        return _Watch(checkpoint, batch, sequence).run()
    except FOREIGN_ERRORS as error:
        raise CheckpointError(
            f"{checkpoint.path}: the work of its layers cannot be estimated: {error}; use another model"
        ) from error


class _Watch:
    """Record of the work done up to each point where the pass, or its gradient, crosses the boundary of a layer."""

    def __init__(self, checkpoint: Checkpoint, batch: int, sequence: int) -> None:
        self.family = checkpoint.family
        self.batch, self.sequence = batch, sequence
        self.counter = WorkCounter()
        self.forward: list[ComputeWork] = []  # work up to the begin of unit k, for k > 0, and up to the end
        self.backward: dict[int, ComputeWork] = {}  # work up to where the gradient leaves unit k
        self.saved_bytes: list[dict[Any, int]] = [{}]  # bytes by storage, by unit
        self.hidden_bytes = 0

    def run(self) -> list[UnitEstimate]:
        with FakeTensorMode():
            with no_init_weights():
                model = self.family.model_class(copy.deepcopy(self.family.config)).train()

            def entering(_: Any, args: Any, kwargs: Any, *, unit: int) -> None:
                self._cross(unit, args[0] if args else kwargs["hidden_states"])

            def leaving(_: Any, __: Any, output: Any) -> None:
                self._cross(self.family.units - 1, output[0] if isinstance(output, tuple) else output)

            for number, layer in enumerate(model.get_submodule(self.family.stack_name)):
                layer.register_forward_pre_hook(partial(entering, unit=number + 1), with_kwargs=True)
            layer.register_forward_hook(leaving)
            ids_BT = torch.zeros(self.batch, self.sequence, dtype=torch.int64)
            held = {storage_of(parameter) for parameter in model.parameters()}
            with (
                self.counter,
                saved_tensors_hooks(lambda tensor: self._record_saved(tensor, held), lambda tensor: tensor),
            ):
                loss = next_token_loss(model(input_ids=ids_BT, use_cache=False).logits, ids_BT)
                self.forward.append(self.counter.work)
                loss.backward()
            return self._collect(model, bytes_of(ids_BT))

    def _cross(self, unit: int, hidden_BTH: Tensor) -> None:
        self.forward.append(self.counter.work)
        self.saved_bytes.append({})
        self.hidden_bytes = bytes_of(hidden_BTH)

        def record(_: Tensor) -> None:
            self.backward[unit] = self.counter.work

        hidden_BTH.register_hook(record)

    def _record_saved(self, tensor: Tensor, held: set[Any]) -> Tensor:
        if storage_of(tensor) not in held:
            self.saved_bytes[-1][storage_of(tensor)] = bytes_of(tensor)
        return tensor

    def _collect(self, model: Any, ids_bytes: int) -> list[UnitEstimate]:
        units = self.family.units
        parameter_bytes = [0] * units
        for name, parameter in model.named_parameters():
            for unit in self.family.units_of_tensor(name):
                parameter_bytes[unit] += bytes_of(parameter)
        begins = [ComputeWork(), *self.forward]
        ends = {**self.backward, units: self.forward[-1], 0: self.counter.work}
        return [
            UnitEstimate(
                forward=begins[unit + 1] - begins[unit],
                backward=ends[unit] - ends[unit + 1],
                activation_bytes=sum(self.saved_bytes[unit].values()),
                parameter_bytes=parameter_bytes[unit],
                boundary_bytes=self.hidden_bytes if unit else ids_bytes,
            )
            for unit in range(units)
        ]
