"""GraphSegment: trains and serves units of a graph. It interprets: operators are looked up once, then called in order.

Range checks: numbers that operators use as indices into a table, or as probabilities, are checked before their use.

These numbers come from samples and from other peers. On a CPU one out of range is an IndexError. On a CUDA device it is a failed
assertion, and with it the whole process loses the device. So they are compared on the device, without waiting for it. Those out of
range are replaced by valid ones, and the pass is refused when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.compute.graph.boundary import (
    Layout,
    Unit,
    Value,
    batch_of,
    check_labels,
    described,
    text_of,
    values_taken,
)
from swarmnode.compute.graph.graph import (
    INSTEAD_OF_OPERATOR,
    Argument,
    Graph,
    Poly,
    Ref,
    argument_value,
    draws_by_device,
    gives_list,
    is_random,
    resolve,
    torch_constant,
)
from swarmnode.compute.graph.label_count import WeighedMeans
from swarmnode.compute.graph.serialise import GraphCheckpoint
from swarmnode.compute.training.randomness import CounterDropout, reseed
from swarmnode.compute.training.saved_activations import is_finite
from swarmnode.compute.training.segment import Segment, Shares, Values
from swarmnode.errors import CheckpointError, ProtocolError

Arguments = Mapping[str, Any]
"""Arguments of an operator, by their names in its schema"""


class RangeCheck:
    """Check that the indexes and numbers that a graph's operators take from samples and from other peers are in range, for one
    pass at a time."""

    def __init__(self) -> None:
        self._wrong: Tensor | None = None  # bool, on the device

    def guarded(self, operator: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function of an operator, like "aten.gather.default", so that its arguments are made safe first.

        Operators without a rule are returned unchanged.
        """
        rule = _RULES.get(operator.split(".")[1])
        if rule is None:
            return function
        computes = INSTEAD_OF_OPERATOR.get(operator, function)
        arguments = function._schema.arguments  # type: ignore[attr-defined]
        names = [argument.name for argument in arguments]
        defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}

        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            return computes(**given | rule(self, defaults | given))

        return call

    def begin(self) -> None:
        """Begin another pass: forget the faults of the one before."""
        self._wrong = None

    def all_well(self) -> bool:
        """Return whether everything was in range since `begin`. Waits for the device if anything was compared."""
        return self._wrong is None or not bool(self._wrong)

    def places(self, places: Tensor, low: int, high: int, *, passes: int | None = None) -> Tensor:
        """Return the indices with those outside [low, high) replaced by 0; `passes` is one more that is valid."""
        wrong = (places < low) | (places >= high)
        return self.replaced(places, wrong if passes is None else wrong & (places != passes))

    def together(self, values: Tensor, wrong: Tensor, instead: Tensor | int) -> Tensor:
        """Return the values, all replaced by `instead` if any of `wrong` is true."""
        return torch.where(self._record_wrong(wrong), torch.as_tensor(instead).to(values), values)

    def replaced(self, values: Tensor, wrong: Tensor, instead: int = 0) -> Tensor:
        """Return the values, those of them replaced by `instead` that are `wrong`."""
        self._record_wrong(wrong)
        return values.masked_fill(wrong, instead)

    def _record_wrong(self, wrong: Tensor) -> Tensor:
        found = wrong.any()
        self._wrong = found if self._wrong is None else self._wrong | found
        return found


def _rows(check: RangeCheck, given: Arguments) -> dict[str, Any]:
    return {"indices": check.places(given["indices"], 0, given["weight"].shape[0])}


def _bags(check: RangeCheck, arguments: Arguments) -> dict[str, Any]:
    """Check offsets: they begin at 0, never decrease, and lie within the indices."""
    offsets, count = arguments["offsets"], len(arguments["indices"])
    wrong = (offsets < 0) | (offsets > count)
    wrong[:1] |= offsets[:1] != 0
    wrong[1:] |= offsets.diff() < 0
    return {**_rows(check, arguments), "offsets": check.together(offsets, wrong, 0)}


def _repeats(check: RangeCheck, arguments: Arguments) -> dict[str, Any]:
    """Check repeats: they are not negative, and make up the declared size of the result."""
    repeats, size = arguments["repeats"], arguments["output_size"]
    if not isinstance(repeats, Tensor):
        return {}
    if size is None:
        return {"repeats": check.places(repeats, 0, torch.iinfo(torch.int32).max)}
    times = 1
    if "self" in arguments and repeats.numel() == 1:  # repeats each element
        source, dim = arguments["self"], arguments["dim"]
        times = source.numel() if dim is None else source.shape[dim]
    wrong = (repeats < 0).any() | (repeats.sum() * times != size)
    instead = torch.zeros_like(repeats)
    instead[:1] = size // times
    return {"repeats": check.together(repeats, wrong, instead)}


def _shares(check: RangeCheck, arguments: Arguments) -> dict[str, Any]:
    """Check the weights of a draw: not negative, infinite or NaN, and no rows of zeros. Wrong ones become 1."""
    values = arguments["self"]
    wrong = ~((values >= 0) & (values < float("inf")))
    nothing = values.masked_fill(wrong, 0).sum(-1, keepdim=True) == 0
    return {"self": check.replaced(values, wrong | nothing, 1)}


def _along(check: RangeCheck, arguments: Arguments, name: str = "index", *, from_end: bool = False) -> dict[str, Any]:
    """Check places in a dimension, or in all elements without one. `from_end`: negative numbers count from its end."""
    source, dim = arguments["self"], arguments.get("dim")
    size = source.numel() if dim is None else source.shape[dim] if source.dim() else 1
    return {name: check.places(arguments[name], -size if from_end else 0, size)}


def _index(check: RangeCheck, arguments: Arguments) -> dict[str, Any]:
    """Check one index for each of the first dimensions. A mask covers as many dimensions as it has."""
    indices: list[Any] = []
    dim = 0
    for index in arguments["indices"]:
        is_places = index is not None and index.dtype not in (torch.bool, torch.uint8)
        size = arguments["self"].shape[dim]
        indices.append(check.places(index, -size, size) if is_places else index)
        dim += 1 if index is None or is_places else index.dim()
    return {"indices": indices}


def _classes(check: RangeCheck, arguments: Arguments) -> dict[str, Any]:
    scores, target = arguments["self"], arguments["target"]
    if target.is_floating_point():
        return {}
    count = scores.shape[1 if scores.dim() > 1 else 0]
    return {"target": check.places(target, 0, count, passes=arguments.get("ignore_index"))}


def _labels(check: RangeCheck, given: Arguments) -> dict[str, Any]:
    return {"target": check.places(given["target"], -1, given["self"].shape[-1])}


def _one_hot(check: RangeCheck, arguments: Arguments) -> dict[str, Any]:
    count = arguments["num_classes"]
    return {"self": check.places(arguments["self"], 0, count if count > 0 else torch.iinfo(torch.int32).max)}


def _probabilities(check: RangeCheck, arguments: Arguments) -> dict[str, Any]:
    """Check a tensor of probabilities, unless one number (`p`) is given for all elements. NaN is wrong, too."""
    values = arguments["self"]
    return {} if "p" in arguments else {"self": check.replaced(values, ~((values >= 0) & (values <= 1)))}


def _masked(check: RangeCheck, arguments: Arguments) -> dict[str, Any]:
    """Check a mask: it may not choose more places than the source has elements."""
    mask = arguments["mask"].expand(torch.broadcast_shapes(arguments["mask"].shape, arguments["self"].shape))
    beyond = mask & (mask.flatten().cumsum(0).view(mask.shape) > prod(arguments["source"].shape))
    return {"mask": check.replaced(mask, beyond)}


def _asserted(check: RangeCheck, arguments: Arguments) -> dict[str, Any]:
    """Check an assertion that the export assumed for every batch."""
    truth = arguments["self"]
    return {"self": check.together(truth, ~truth.bool(), 1)}


def _transcripts(check: RangeCheck, arguments: Arguments) -> dict[str, Any]:
    """Check labels against the number of classes, and lengths against the scores and the labels."""
    scores, targets = arguments["log_probs"], arguments["targets"]
    if targets.dim() > 1:  # labels behind a row's end are never read
        lengths = torch.as_tensor(arguments["target_lengths"], device=targets.device)
        behind = torch.arange(targets.shape[1], device=targets.device) >= lengths[:, None]
        targets = targets.masked_fill(behind, 0)
    safe: dict[str, Any] = {"targets": check.places(targets, 0, scores.shape[-1])}
    if isinstance(arguments["input_lengths"], Tensor):
        safe["input_lengths"] = check.places(arguments["input_lengths"], 0, scores.shape[0] + 1)
    lengths = arguments["target_lengths"]
    if isinstance(lengths, Tensor):
        most = targets.shape[1] if targets.dim() > 1 else targets.numel()
        wrong = (lengths < 0) | (lengths > most)
        if targets.dim() == 1:
            wrong = wrong | (lengths.sum() != most)
        safe["target_lengths"] = check.together(lengths, wrong.any(), 0)
    return safe


def _groups(check: RangeCheck, arguments: Arguments) -> dict[str, Any]:
    """Check the ends of groups of rows: they never decrease, and lie within the rows."""
    ends = arguments["offs"]
    if ends is None:
        return {}
    left, right = arguments["self"], arguments["mat2"]
    count = left.shape[0] if right.dim() == 3 else left.shape[-1] if left.dim() == 2 else right.shape[-1]
    wrong = (ends < 0) | (ends > count)
    wrong[1:] |= ends.diff() < 0
    return {"offs": check.together(ends, wrong.any(), count)}


_RULES: dict[str, Callable[[RangeCheck, Arguments], dict[str, Any]]] = {
    "embedding": _rows,
    "embedding_bag": _bags,
    "repeat_interleave": _repeats,
    "multinomial": _shares,
    **dict.fromkeys(("index_select", "gather", "index_add", "index_copy"), _along),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), _along),
    **dict.fromkeys(("index", "index_put"), _index),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"), _classes),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"), _classes),
    "multilabel_margin_loss": _labels,
    "index_fill": partial(_along, from_end=True),
    "take": partial(_along, from_end=True),
    "take_along_dim": partial(_along, name="indices"),
    "one_hot": _one_hot,
    "binary_cross_entropy": _probabilities,
    "bernoulli": _probabilities,
    "masked_scatter": _masked,
    "_assert_async": _asserted,
    "ctc_loss": _transcripts,
    "_grouped_mm": _groups,
}


@dataclass(frozen=True)
class _Slot:
    """Number of the place where a value is stored while a piece of a graph computes."""

    number: int


@dataclass(frozen=True)
class _Call:
    """Operator with its arguments. `results`: its results and their slots; `done`: slots that no later call needs."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[tuple[int | None, int], ...]
    done: tuple[int, ...]


@dataclass(frozen=True)
class _Program:
    """Unit, ready to run. `moves`: buffers and the slots of their new values."""

    calls: tuple[_Call, ...]
    moves: tuple[tuple[Tensor, int], ...]
    is_random: bool


class GraphSegment(Segment):
    """Units [start, end) of a graph. `weights` are by their names in the state dict; they are taken over, not copied.

    Without `counts_dropout`, dropout draws from torch's generators, as the module's own does.
    """

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, Tensor],
        start: int,
        end: int,
        *,
        device: torch.device | str = "cpu",
        counts_dropout: bool = True,
    ) -> None:
        self.graph = graph
        self.layout = Layout(graph)
        self.start, self.end, self.units = start, end, graph.units
        self.device = torch.device(device)
        self._slots: dict[Ref, int] = {}
        self._ranges = RangeCheck()
        self._means = WeighedMeans(graph)
        self.means = len(self._means)
        self._dropout = CounterDropout() if counts_dropout else None
        self.is_portable = not any(draws_by_device(node.operator, node.args) for node in graph.nodes)
        held = {name for unit in self.layout.units[start:end] for name in unit.weights}
        self._weights = {weight.name: weight for weight in graph.weights if weight.name in held}
        self._tensors: dict[str, Tensor] = {}
        for name, weight in self._weights.items():
            tensor, kind = weights[weight.tensor].to(self.device), weight.type
            if tuple(tensor.shape) != kind.shape or str(tensor.dtype) != f"torch.{kind.dtype}":
                (text,) = map(text_of, described([tensor]))
                raise CheckpointError(
                    f"the tensor {weight.tensor} is {text}, but the graph has {kind.dtype} {kind.shape}; export the module again"
                )
            self._tensors[name] = nn.Parameter(tensor) if weight.trained else tensor
        self._programs = {number: self._compile(self.layout.units[number], number) for number in range(start, end)}
        places = {self._slot(Ref(name)): tensor for name, tensor in self._tensors.items()}
        self._template: list[Any] = [places.get(slot) for slot in range(len(self._slots))]

    def __repr__(self) -> str:
        return f"GraphSegment([{self.start}:{self.end}) of {self.units} units on {self.device})"

    def parameters(self) -> Mapping[int, Mapping[str, nn.Parameter]]:
        """Return the trained parameters, see `Segment`. Parameters that the module's author froze are left out."""
        blocks: dict[int, dict[str, nn.Parameter]] = {}
        for name, tensor in self._tensors.items():
            if isinstance(tensor, nn.Parameter):
                blocks.setdefault(self.layout.blocks[name], {})[self._weights[name].tensor] = tensor
        return blocks

    def buffers(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Return the buffers that training updates, see `Segment`."""
        units: dict[int, dict[str, Tensor]] = {}
        for name, unit in self.layout.blocks.items():
            if name in self._tensors and not self._weights[name].trained:
                units.setdefault(unit, {})[self._weights[name].tensor] = self._tensors[name]
        return units

    def forward(
        self, values: Values, start: int, end: int, seed: int, labels: Values = (), shares: Shares = ()
    ) -> Values:
        """Run layers [start, end), as `Segment.forward` describes. Raises ProtocolError for values that are not those of the
        boundary, or out of an operator's range."""
        boundary = self.layout.boundaries[start]
        batch = batch_of(self.layout, start, described(values))
        coming, tensors = boundary, values
        if end == self.units:
            check_labels(self.layout, described(labels), batch)
            coming, tensors = (*boundary, *self.layout.labels), (*values, *labels)
        slots = self._template.copy()
        for value, tensor in zip(coming, tensors, strict=True):
            slots[self._slots[value.ref]] = tensor if value.trained else tensor.detach().to(self.device)
        self._ranges.begin()
        self._means.begin(shares)
        for number in range(start, end):
            self._run(number, slots, batch, seed)
        passing = {value.ref: tensor for value, tensor in zip(coming, tensors, strict=True) if not value.trained}
        leaving = self.layout.boundaries[end]
        outputs = tuple(passing.get(value.ref, slots[self._slots[value.ref]]) for value in leaving)
        if not self._ranges.all_well() and is_finite(outputs):  # NaN is the caller's to see, which may know better
            raise ProtocolError(
                f"layers [{start}:{end}) of the graph cannot work with "
                "this batch: a number is out of range, or an assumption "
                "of the module does not hold"
            )
        return outputs

    def dummies(self, boundary: int, batch: int, sequence: int) -> tuple[Values, Values]:
        """Return made-up values: floats of usual size, all whole numbers 0. See `Segment`."""
        batch = batch if self.graph.any_batch else self.graph.batch
        chance = torch.Generator().manual_seed(boundary)

        def made_up(value: Value) -> Tensor:
            dtype, sizes = torch_constant(value.type.dtype), value.type.sizes(batch)
            return (torch.randn(sizes, generator=chance) if dtype.is_floating_point else torch.zeros(sizes)).to(dtype)

        return tuple(map(made_up, self.layout.boundaries[boundary])), tuple(map(made_up, self.layout.labels))

    def _run(self, number: int, slots: list[Any], batch: int, seed: int) -> None:
        program = self._programs[number]
        if program.is_random:
            reseed(seed, number, self.device)
        dropout = self._dropout if program.is_random else None
        if dropout is not None:
            dropout.begin(seed, number)
        try:
            with dropout or nullcontext():
                for call in program.calls:
                    args = [_fill(argument, slots, batch) for argument in call.args]
                    kwargs = {key: _fill(argument, slots, batch) for key, argument in call.kwargs.items()}
                    output = call.function(*args, **kwargs)
                    for item, slot in call.results:
                        slots[slot] = output if item is None else output[item]
                    for slot in call.done:
                        slots[slot] = None
        except (IndexError, torch.linalg.LinAlgError) as error:
            raise ProtocolError(f"layer {number} of the graph cannot work with this batch: {error}") from error
        for buffer, slot in program.moves:
            buffer.data.copy_(slots[slot].detach())  # data: autograd must not see it as a change of kept graphs

    # -- programs

    def _compile(self, unit: Unit, number: int) -> _Program:
        """Assign slots to values and functions to names. A slot is freed after its last use in the units here."""
        leaving = {value.ref for boundary in self.layout.boundaries[number + 1 :] for value in boundary}
        later = {ref for following in self.layout.units[number + 1 : self.end] for ref in values_taken(following)}
        kept = leaving | later | {move.value for move in unit.moves} | {Ref(name) for name in unit.weights}
        for value in (*self.layout.boundaries[number], *self.layout.labels):
            self._slot(value.ref)
        last_use = {ref: node.name for node in unit.nodes for ref in node.refs() if ref not in kept}
        calls = []
        for node in unit.nodes:
            done = sorted({self._slot(ref) for ref in node.refs() if last_use.get(ref) == node.name})
            function = resolve(node.operator)
            if len(node.types) == 1:
                item = 0 if gives_list(function) else None
                results: list[tuple[int | None, int]] = [(item, self._slot(Ref(node.name)))]
            else:
                results = [(item, self._slot(Ref(node.name, item))) for item in range(len(node.types))]
            call = _Call(
                function=self._means.guarded(node, self._ranges.guarded(node.operator, function)),
                args=tuple(map(self._compile_argument, node.args)),
                kwargs={key: self._compile_argument(argument) for key, argument in node.kwargs.items()},
                results=tuple(results),
                done=tuple(done),
            )
            calls.append(call)
        return _Program(
            calls=tuple(calls),
            moves=tuple((self._tensors[move.buffer], self._slot(move.value)) for move in unit.moves),
            is_random=any(is_random(node.operator, node.args) for node in unit.nodes),
        )

    def _compile_argument(self, argument: Argument) -> Any:
        """Return an argument with everything that is the same in every pass filled in."""
        if isinstance(argument, list):
            return [self._compile_argument(atom) for atom in argument]
        if isinstance(argument, Ref):
            return _Slot(self._slot(argument))
        return argument if isinstance(argument, Poly) else argument_value(argument, self.device)

    def _slot(self, ref: Ref) -> int:
        return self._slots.setdefault(ref, len(self._slots))


def load_segment(folder: Path, start: int, end: int, *, device: torch.device | str = "cpu") -> GraphSegment:
    """Load units [start, end) of the graph in `folder`. Raises CheckpointError."""
    checkpoint = GraphCheckpoint(folder)
    names = checkpoint.tensors_of(start, end)
    missing = [name for name in names if name not in checkpoint.entries]
    if missing:
        raise CheckpointError(
            f"{folder}: the graph needs the tensor {missing[0]}, which the weights lack; export the module again"
        )
    # Training must not write into a mapped file.
    copies = {name: tensor.clone() for name, tensor in checkpoint.read(names).items()}
    return GraphSegment(checkpoint.graph, copies, start, end, device=device)


def _fill(argument: Any, slots: list[Any], batch: int) -> Any:
    kind = type(argument)
    if kind is _Slot:
        return slots[argument.number]
    if kind is list:
        return [_fill(item, slots, batch) for item in argument]
    return argument.at(batch) if kind is Poly else argument
