"""Reader of the functional program that torch.export made, into a graph.

Reasons why a module cannot be exported, for its author: the operator, the line of the code, and a remedy.
"""

from __future__ import annotations

import math
import operator
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from swarmnode.compute.graph.graph import (
    ASSERT,
    BATCH_NORM_WITHOUT_STATISTICS,
    BUFFER,
    CONSTANT,
    COPY,
    DETACH,
    EVALUATED_BATCH_NORM,
    FUNCTIONAL_BATCH_NORM,
    INSTEAD,
    NAMED,
    PARAMETER,
    SHAPED,
    SPARSE,
    Argument,
    BufferUpdate,
    Constant,
    Graph,
    GraphInput,
    GraphOutput,
    Here,
    OperatorCall,
    Poly,
    Real,
    Ref,
    Size,
    TensorType,
    Weight,
    moved_by_batch_norm,
    resolve,
)
from swarmnode.errors import CheckpointError, UsageError

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
DATA_DEPENDENT = "data-dependent"
REMEDY = "use torch.where or a mask in place of if, for, indexing by a mask and .item()"


class FailedCall(TorchFunctionMode):
    """Recorder of the innermost torch function that raised."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function. Record its name if it raises."""
        try:
            return function(*args, **(kwargs or {}))
        except Exception:
            self.name = self.name or resolve_name(function) or getattr(function, "__name__", str(function))
            raise


def complaint(error: Exception, failed: FailedCall) -> str:
    """Return the text for the user about an error of torch.export: the operator, the line and the reason."""
    reason = str(error).strip().partition("\n")[0].partition(" (unhinted")[0] or type(error).__name__
    operator = f"the operator {failed.name}" if failed.name else "an operation"
    text = f"the module cannot be exported: {operator} in {source_of(error)} failed: {reason.rstrip('.')}"
    if DATA_DEPENDENT in reason:
        text += f". Which operators run must not depend on the values of tensors: {REMEDY}"
    return text


def source_of(error: Exception) -> str:
    """Return file, line and source text of the last frame in the user's own code; a fixed text if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own(frame.filename)]
    if not own:
        return "code that torch does not name"
    return f"{own[-1].filename}, line {own[-1].lineno}: `{own[-1].line}`"


def is_own(file: str) -> bool:
    """Return whether the code in `file` is the user's own, not torch's or that of swarmnode's export."""
    return not file.startswith((_TORCH, _HERE, "<"))


def source_of_node(node: Any) -> str:
    """Return file, line and text of the module's own code behind a node of torch.fx."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    places = [number for number, line in enumerate(lines) if line.startswith("File ") and _TORCH not in line]
    if not places:
        return "code that torch does not name"
    place = places[-1]
    file = lines[place].removeprefix("File ").replace('"', "").partition(", in ")[0]
    code = lines[place + 1] if place + 1 < len(lines) else ""
    return f"{file}: `{code}`"


WRAPPER_PREFIX = "module."
_WEIGHT_KINDS = ("PARAMETER", "BUFFER", "CONSTANT_TENSOR")


@dataclass(frozen=True)
class Exported:
    """A graph, and its initial weights by their names in the state dict. `remarks` are for the founder."""

    graph: Graph
    weights: dict[str, Tensor]
    remarks: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Exported({self.graph})"


def read_program(module: nn.Module, program: Any) -> Exported:
    """Read the graph of a program that gives a loss, or its outputs by name.

    Raises UsageError, with the source line, for operators and arguments that a graph may not hold, and CheckpointError for a size
    that is no polynomial of the batch.
    """
    return _Reader(module, program).read()


class _Reader:
    def __init__(self, module: nn.Module, program: Any) -> None:
        self.program = program
        returned = program.call_spec.out_spec
        self.output_names = tuple(map(str, returned.context)) if returned.type is dict else ()
        self.signature = program.graph_signature
        self.module = type(module).__name__
        self.batch = _batch_symbol(program)
        self.state_names = {
            id(tensor): name for named in (module.named_parameters(), module.named_buffers()) for name, tensor in named
        }
        self.inputs: list[GraphInput] = []
        self.weights: dict[str, Weight] = {}  # by name in the state dict
        self.tensors: dict[str, Tensor] = {}
        self.nodes: list[OperatorCall] = []
        self.batch_norms: set[str] = set()
        self.refs: dict[Any, Ref | Size] = {}  # by torch's node

    def read(self) -> Exported:
        placeholders = {node.name: node for node in self.program.graph.nodes if node.op == "placeholder"}
        for spec in self.signature.input_specs:
            node = placeholders[spec.arg.name]
            self.refs[node] = Ref(node.name)
            if spec.kind.name == "USER_INPUT" and isinstance(node.meta.get("val"), Tensor):
                self.inputs.append(GraphInput(node.name, self._type(node.meta["val"])))
            elif spec.kind.name in _WEIGHT_KINDS:
                self._read_weight(spec, node)
            else:
                raise UsageError(
                    f"{self.module} takes or holds {spec.target or node.name}, which is not a tensor; use tensors only"
                )
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._read_call(node)
        moves, results = self._read_outputs(
            {spec.target: placeholders[spec.arg.name] for spec in self.signature.input_specs}
        )
        moved = {move.buffer for move in moves} | {name for node in self.nodes for name in moved_by_batch_norm(node)}
        graph = Graph(
            inputs=tuple(self.inputs),
            weights=tuple(
                Weight(weight.name, weight.tensor, BUFFER, False, weight.type) if weight.name in moved else weight
                for weight in self.weights.values()
            ),
            nodes=tuple(self.nodes),
            moves=tuple(moves),
            loss=None if self.output_names else results[0],
            batch=_example_batch(self.signature, placeholders),
            any_batch=self.batch is not None,
            outputs=tuple(map(GraphOutput, self.output_names, results)),
        )
        return Exported(graph, self.tensors)

    # -- inputs and weights

    def _read_weight(self, spec: Any, node: Any) -> None:
        state = self.program.state_dict
        tensor = state[spec.target] if spec.target in state else self.program.constants[spec.target]
        name = self.state_names.get(id(tensor), spec.target.removeprefix(WRAPPER_PREFIX))
        if name not in self.weights:  # otherwise it is tied: one tensor under two names
            is_parameter = spec.kind.name == "PARAMETER"
            trained = is_parameter and tensor.requires_grad and not self.output_names
            kind = PARAMETER if is_parameter else CONSTANT
            self.weights[name] = Weight(node.name, name, kind, trained, self._type(node.meta["val"]))
            self.tensors[name] = tensor.detach()
        self.refs[node] = Ref(self.weights[name].name)

    # -- calls

    def _read_call(self, node: Any) -> None:
        value = node.meta.get("val")
        self._check_sizes(node, value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            self.refs[node] = self._size(value)
            if isinstance(value, torch.SymFloat) and not all(map(_is_of_floats, node.users)):
                raise self._refusal(node, "a float that follows from the batch, together with whole numbers,")
        elif node.target is operator.getitem:
            source = self._argument(node.args[0], node)
            if not isinstance(source, Ref):
                raise self._refusal(node, "a part of a number")
            is_whole = source.name in self.batch_norms or len(node.args[0].meta["val"]) == 1
            self.refs[node] = source if is_whole else Ref(source.name, node.args[1])
        elif str(node.target) == COPY:
            self._read_copy(node, node.args[1])
        elif str(node.target).startswith(ASSERT.removesuffix("default")):
            self._add(node.name, ASSERT, (self._argument(node.args[0], node),), {}, (None,))
        elif node.users:
            self._read_operator(node, value)

    def _read_copy(self, node: Any, source: Any) -> None:
        """Read a write over a value: the result is the source, in the value's shape and dtype."""
        ref, given, wanted = self._argument(source, node), self._type(source.meta["val"]), self._type(node.meta["val"])
        if given.dtype != wanted.dtype:
            converted = TensorType(wanted.dtype, given.shape)
            dtype_of: dict[str, Argument] = {"dtype": Constant(wanted.dtype)}
            ref = self._add(f"{node.name}_converted", "aten._to_copy.default", (ref,), dtype_of, (converted,))
        if given.shape != wanted.shape:
            ref = self._add(node.name, "aten.expand.default", (ref, list(wanted.shape)), {}, (wanted,))
        assert isinstance(ref, Ref)
        self.refs[node] = ref

    def _read_operator(self, node: Any, value: Any) -> None:
        name, args, kwargs = str(node.target), node.args, dict(node.kwargs)
        if name == BATCH_NORM_WITHOUT_STATISTICS:
            self._check_batch_norm(node)
            args, value = (*args[:3], None, None, *args[3:6], True), value[:1]
            self.batch_norms.add(node.name)
        if name in (FUNCTIONAL_BATCH_NORM, EVALUATED_BATCH_NORM):
            self._check_batch_norm(node)
            trains = () if name == FUNCTIONAL_BATCH_NORM else (False,)
            args, value = (*args[:5], *trains, *args[5:], True), value[:1]
            self.batch_norms.add(node.name)
        if name in INSTEAD:
            name = INSTEAD[name]
            kwargs.pop("memory_format", None)
        try:
            resolve(name)
        except CheckpointError:
            raise self._refusal(node, name) from None
        values = value if isinstance(value, list | tuple) else (value,)
        arguments = [self._argument(argument, node) for argument in args]
        if name in SPARSE and len(arguments) > SPARSE[name]:
            arguments[SPARSE[name]] = False
        if name in SHAPED:
            shape = self._type(args[0].meta["val"])
            arguments[0] = self._add(f"{node.name}_shape", DETACH, (arguments[0],), {}, (shape,))
        types = tuple(self._type(item) if isinstance(item, Tensor) else None for item in values)
        named = {key: self._argument(argument, node) for key, argument in kwargs.items()}
        self.refs[node] = self._add(node.name, name, tuple(arguments), named, types)

    def _add(
        self,
        name: str,
        operator: str,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
        types: tuple[TensorType | None, ...],
    ) -> Ref:
        self.nodes.append(OperatorCall(name, operator, args, kwargs, types))
        return Ref(name)

    def _check_sizes(self, node: Any, value: Any) -> None:
        """Raise UsageError for sizes that depend on the values of tensors."""
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

        if value is not None and free_unbacked_symbols(value):
            raise UsageError(
                f"the module cannot be exported: the size of what {node.target} gives in {source_of_node(node)} depends on the "
                f"values of tensors: {REMEDY}"
            )

    def _check_batch_norm(self, node: Any) -> None:
        """Check that only the output of a batch norm is used: in a graph it updates its statistics itself and returns one tensor.

        Raises UsageError otherwise.
        """
        for part in node.users:
            if part.args[1] != 0 and any(user.op != "output" for user in part.users):
                raise self._refusal(node, "a batch norm that is used twice, or whose other results are used,")

    def _refusal(self, node: Any, name: str) -> UsageError:
        return UsageError(
            f"the module cannot be exported: {name} in {source_of_node(node)} is not "
            "among the operators that a graph may use; write it with other torch operators"
        )

    # -- arguments and types

    def _argument(self, argument: Any, node: Any) -> Argument:
        if isinstance(argument, list | tuple):
            return [self._atom(item, node) for item in argument]
        atom: Argument = self._atom(argument, node)
        return atom

    def _atom(self, value: Any, node: Any) -> Any:
        if isinstance(value, torch.fx.Node) and value in self.refs:
            return self.refs[value]
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else Real(str(value))
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return Constant(str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return Here()
        raise self._refusal(node, f"{node.target} with {value} (a {type(value).__name__})")

    def _type(self, tensor: Tensor) -> TensorType:
        return TensorType(str(tensor.dtype).removeprefix("torch."), tuple(map(self._size, tensor.shape)))

    def _size(self, size: Any) -> Size:
        """Return the graph's form of a size of torch. Raises CheckpointError if it is no whole polynomial of the batch."""
        import sympy
        from torch.utils._sympy.functions import ToFloat

        if isinstance(size, int):
            return size
        expression = size.node.expr.replace(ToFloat, lambda whole: whole)
        if isinstance(size, torch.SymInt) and expression.is_Integer:
            return int(expression)
        try:
            coefficients = sympy.Poly(expression, self.batch).all_coeffs()[::-1]
        except (sympy.PolynomialError, sympy.GeneratorsError) as error:
            raise CheckpointError(
                f"{expression} is not a polynomial in the size of the batch; use another shape"
            ) from error
        if isinstance(size, torch.SymBool) or not all(coefficient.is_Integer for coefficient in coefficients):
            raise CheckpointError(f"{expression} is not a whole number for every size of the batch; use another shape")
        return Poly(tuple(map(int, coefficients)))

    # -- outputs

    def _read_outputs(self, placeholders: dict[str, Any]) -> tuple[list[BufferUpdate], list[Ref]]:
        """Return the updates of buffers, except those that batch norms make themselves, and the loss or the outputs.

        Raises UsageError for a result that depends on nothing, or a change of something other than a buffer.
        """
        (outputs,) = self.program.graph.find_nodes(op="output")[0].args
        moves: list[BufferUpdate] = []
        results: list[Ref] = []
        weights = {weight.name for weight in self.weights.values()}
        for spec, node in zip(self.signature.output_specs, outputs, strict=True):
            value = self._argument(node, node)
            if spec.kind.name == "USER_OUTPUT":
                if not isinstance(value, Ref) or value.name in weights:
                    what = self.output_names[len(results)] if self.output_names else "the loss"
                    raise UsageError(
                        f"{what} of {self.module} does not depend on the batch; compute it from the inputs"
                    )
                results.append(value)
            elif spec.kind.name != "BUFFER_MUTATION":
                changed = (spec.target or node.name).removeprefix(WRAPPER_PREFIX).removeprefix(NAMED)
                raise UsageError(
                    f"{self.module} changes {changed}, which is not a "
                    "buffer of its own; register it with register_buffer"
                )
            elif isinstance(value, Ref) and value.name not in self.batch_norms:
                buffer = self.refs[placeholders[spec.target]]
                assert isinstance(buffer, Ref)
                moves.append(BufferUpdate(buffer.name, value))
        return moves, results


def _is_of_floats(node: Any) -> bool:
    """Return whether all tensors that a call takes and gives are floats, so that a whole number in place of a float is the same."""
    values = [argument.meta.get("val") for argument in (node, *node.all_input_nodes)]
    return all(value.is_floating_point() for value in values if isinstance(value, Tensor))


def _batch_symbol(program: Any) -> Any:
    """Return the symbol of the batch in all inputs' sizes; None if they are fixed.

    Raises CheckpointError if there are several symbols, or sizes that are only multiples of one.
    """
    inputs = (node.meta.get("val") for node in program.graph.find_nodes(op="placeholder"))
    sizes = [size for value in inputs for size in getattr(value, "shape", ()) if isinstance(size, torch.SymInt)]
    symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols}
    if len(symbols) > 1:
        raise CheckpointError("the inputs have batches of different sizes; give all inputs the same first dimension")
    symbol = next(iter(symbols), None)
    if symbol is not None and all(size.node.expr != symbol for size in sizes):
        raise CheckpointError(
            "the batch must be a multiple of a number other than 1; let the module take any number of samples"
        )
    return symbol


def _example_batch(signature: Any, placeholders: dict[str, Any]) -> int:
    for spec in signature.input_specs:
        shape = placeholders[spec.arg.name].meta["val"].shape
        if spec.kind.name == "USER_INPUT" and shape:
            return shape[0] if isinstance(shape[0], int) else int(shape[0].node.hint)
    return 1
