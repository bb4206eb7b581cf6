"""Export: a module's pass over an example batch becomes a graph. The module's code runs only here, on the founder's machine.

torch.export traces the module in training mode, or in evaluation mode for a swarm that serves it. Writes in place are made
functional, and operators that torch can differentiate stay whole. Batch norms are put back together, since their
functional form has no derivative.

Guards: questions about values that a module accepts only one answer to, such as `if not x.isfinite().all(): raise`.

A graph has no branches, so it cannot ask a question about values. If the other answer raises, or the question is whether numbers
are finite, the answer for the example batch is assumed, and every pass is checked for it (`graph_segment.py`).

Source of a founder's module: a Python factory "package.module:function", or an exported program "file.pt2".
"""

from __future__ import annotations

import importlib
import inspect
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from swarmnode.compute.graph.archive import load_program
from swarmnode.compute.graph.exporting.gradient_check import Loss, Outputs, check_gradients, untouched
from swarmnode.compute.graph.exporting.reader import (
    DATA_DEPENDENT,
    Exported,
    FailedCall,
    complaint,
    is_own,
    read_program,
    source_of,
)
from swarmnode.compute.graph.graph import BUFFER, Graph, is_random
from swarmnode.compute.graph.label_count import without_hidden_counts
from swarmnode.errors import UsageError

MOST = 32  # questions tried with the other answer
_TESTS = frozenset({"isfinite", "isinf", "isnan"})
_LOGIC = frozenset({"all", "any", "logical_not", "logical_and", "logical_or", "__invert__", "__and__", "__or__"})
_BACKWARD = "a graph holds no backward pass of its own, such as one for a penalty of gradients"
_LOST: dict[Any, str] = {
    Tensor.register_hook: "a graph keeps no hooks of tensors: write what the hook does into forward",
    **dict.fromkeys((Tensor.backward, torch.autograd.backward, torch.autograd.grad), _BACKWARD),
    torch._VF._pack_padded_sequence: "rows are packed by their lengths, which are values: run over padded rows, and mask them",
}
"""Functions that a graph cannot hold, with the reason; tracing would lose them or fail"""
_DATA: Any = Tensor.data
_READ_DATA, _WRITE_DATA = _DATA.__get__, _DATA.__set__


def assumed_answers(run: Callable[[], Any]) -> list[bool | None]:
    """Run a module through `run` and return its answers to questions, in order; None for a question that is no guard."""
    with _Questions() as asked:
        run()
    answers: list[bool | None] = []
    for number, (answer, finite) in enumerate(zip(asked.answers, asked.about_finite, strict=True)):
        is_guard = finite
        if not finite and number < MOST:
            try:
                with _Questions(number):  # with the other answer
                    run()
            except Exception:  # the module's own code may raise anything
                is_guard = True
        answers.append(answer if is_guard else None)
    return answers


def _is_question(function: Any, args: tuple[Any, ...]) -> bool:
    return function is Tensor.__bool__ or (function is Tensor.item and args[0].dtype is torch.bool)


class _Questions(TorchFunctionMode):
    """Recorder of a run's answers to questions. The answer numbered `turned` is turned round."""

    def __init__(self, turned: int = -1) -> None:
        super().__init__()
        self.answers: list[bool] = []
        self.about_finite: list[bool] = []
        self._turned = turned
        self._tests: dict[int, Tensor] = {}  # results of tests for finite numbers alone, by id

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function. Record its answer if it is a question."""
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        tensors = [argument for argument in args if isinstance(argument, Tensor)]
        follows = all(id(tensor) in self._tests for tensor in tensors)
        if _is_question(function, args):
            self.answers.append(bool(result))
            self.about_finite.append(follows)
            return bool(result) != (len(self.answers) - 1 == self._turned)
        if name in _TESTS or (name in _LOGIC and follows):
            self._tests[id(result)] = result
        return result


class AssumedAnswers(TorchFunctionMode):
    """Mode of tracing that gives guards their assumed answers, and puts these into the graph as assertions.

    It refuses calls whose effect tracing would lose, and detaches the `data` of tensors as autograd does.
    """

    def __init__(self, answers: Sequence[bool | None] = ()) -> None:
        super().__init__()
        self._answers = answers
        self._asked = 0

    def begin(self, *_: Any) -> None:
        """Start again at the first question: the module is run from its beginning."""
        self._asked = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or answer a guard. Raises RuntimeError for a write of `data` and for hooks of tensors."""
        if function == _READ_DATA:
            return args[0].detach()
        if function == _WRITE_DATA:
            raise RuntimeError("a graph cannot replace the data of a tensor: use detach and torch.no_grad")
        if function in _LOST:
            raise RuntimeError(_LOST[function])
        if _is_question(function, args) and self._asked < len(self._answers):
            answer = self._answers[self._asked]
            self._asked += 1
            if answer is not None:
                truth = args[0] if answer else args[0].logical_not()
                torch._assert_async(truth, "assumed")  # without a text it is dead code
                return answer
        return function(*args, **(kwargs or {}))


Example = Mapping[str, Tensor] | tuple[Tensor, ...]

_NO_GRAD = "wrap_with_set_grad_enabled"
_CLONE, _DETACH = torch.ops.aten.clone.default, torch.ops.aten.detach.default
_CROSS_ENTROPY = torch.ops.aten.cross_entropy_loss.default


@torch.library.register_fake("aten::_ctc_loss.Tensor")  # type: ignore[untyped-decorator]
def _ctc_shapes(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the shapes of the loss, and of the tensor for its backward pass.

    torch knows none, since the latter depends on lengths. This one may be longer.
    """
    steps, *batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty((*batch, steps, 2 * targets.shape[-1] + 1))


def export_module(module: nn.Module, example: Example, *, any_batch: bool = True, trains: bool = True) -> Exported:
    """Export a module to a graph, for any size of batch if possible.

    Args:
        module: The module. If it trains, its forward gives the mean loss of the batch: a scalar, an output with `.loss`, or a tuple
            that begins with it. Else it gives tensors: one, or several by name or in a row.
        example: Example batch: a tuple of tensors, or a dict of them by argument name.
        any_batch: Try to make a graph for any size of batch. If that fails or False, it works only for the example's.
        trains: Export in training mode with a loss, else in evaluation mode with outputs.

    Returns:
        The graph and the module's weights.

    Raises:
        UsageError: The module does something that a graph cannot hold; the text names the operator and the source line.
    """
    args, kwargs = check_example(module, example)
    if trains:
        _check_trained(module)
    was_training = module.training
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it is one operator for a whole layer, which no graph may use
    try:
        exported = _export(module.train(trains), args, kwargs, any_batch)
    finally:
        module.train(was_training)
        torch.backends.mha.set_fastpath_enabled(fast_path)
    if not trains:
        _check_served(type(module).__name__, exported.graph)
        return exported
    return replace(exported, graph=without_hidden_counts(exported.graph, exported.weights))


def _check_trained(module: nn.Module) -> None:
    """Raise UsageError for parts that training cannot keep: hooks on the backward pass, and parameters that are not float32."""
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise UsageError(
                f"{name or type(module).__name__} has a backward hook, which a graph cannot hold: remove it"
            )
    for name, parameter in module.named_parameters():
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            raise UsageError(f"the parameter {name} has a hook, which a graph cannot hold: remove it")
        if parameter.requires_grad and parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UsageError(f"{name} is {dtype}, and training needs all parameters in float32: call module.float()")


def _check_served(module: str, graph: Graph) -> None:
    """Raise UsageError if a served module draws random numbers or changes its buffers: peers' answers would differ."""
    drawing = next((node for node in graph.nodes if is_random(node.operator, node.args)), None)
    if drawing is not None:
        raise UsageError(
            f"{module} draws random numbers ({drawing.operator}) in evaluation mode, so no two machines would answer alike; "
            "a program must be exported after module.eval()"
        )
    if graph.moves or any(weight.kind == BUFFER for weight in graph.weights):
        raise UsageError(
            f"{module} changes its buffers in evaluation mode, but a served module keeps nothing between passes; "
            "a program must be exported after module.eval()"
        )


def check_example(module: nn.Module, example: Example) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the module's arguments: by position, or by name if they have names, so that the data can name them, too.

    Raises UsageError if there are none, or not all are tensors.
    """
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
    """Export with a batch of any size if the module allows that, else with the example's. Raises UsageError."""
    results = Loss(module) if module.training else Outputs(module)
    attempt = _Attempt(module, results, args, kwargs)
    batch = next((value.shape[0] for value in (*args, *kwargs.values()) if value.dim()), 1)
    if any_batch and batch > 1:
        for dim in (torch.export.Dim("batch"), torch.export.Dim.AUTO):
            with suppress(Exception):  # the last attempt reports any other problem than the batch
                by_place, by_name = (
                    [{0: dim} if value.dim() and value.shape[0] == batch else {} for value in values]
                    for values in (args, kwargs.values())
                )
                return attempt((tuple(by_place), dict(zip(kwargs, by_name, strict=True))))
    failed = FailedCall()
    try:
        with failed:
            program = attempt.trace(None)
    except UsageError:
        raise
    except Exception as error:  # the module's own code and torch may raise anything
        raise UsageError(complaint(error, failed)) from error
    return read_program(module, program)


class _Attempt:
    """Tracing of one module. It finds the module's guards once one of them stops the tracing."""

    def __init__(
        self, module: nn.Module, results: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> None:
        self.module, self.results, self.args, self.kwargs = module, results, args, kwargs
        self.answers: list[bool | None] | None = None

    def __call__(self, shapes: Any) -> Exported:
        return read_program(self.module, self.trace(shapes))

    def trace(self, shapes: Any) -> Any:
        """Trace the module for these `shapes` and return the ExportedProgram. If torch stops at a branch on values, trace again
        with the branches that the example batch takes."""
        try:
            return _trace(self.results, self.args, self.kwargs, shapes, self.answers or ())
        except Exception as error:
            if self.answers is not None or DATA_DEPENDENT not in str(error):
                raise
            with untouched(self.module), seen_by_tracing():
                self.answers = assumed_answers(lambda: self.results(self.args, self.kwargs))
        return _trace(self.results, self.args, self.kwargs, shapes, self.answers)


def _trace(
    module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], shapes: Any, answers: Sequence[bool | None]
) -> Any:
    """Trace `module` with torch.export and return the ExportedProgram with functional operators only."""
    # copies: torch marks sizes on the tensors, and treats one tensor under two names as one input
    example = (tuple(map(torch.clone, args)), {name: value.clone() for name, value in kwargs.items()})
    assumed = AssumedAnswers(answers)
    hook = module.register_forward_pre_hook(assumed.begin)  # torch may run it more than once
    try:
        with _quiet(), seen_by_tracing(), assumed:
            program: Any = torch.export.export(module, example, dynamic_shapes=shapes, strict=False)
            # Without writes in place. Results of regions without gradients are detached, which the rewriting would lose.
            _open_no_grad(program.graph_module)
            (outputs,) = program.graph_module.graph.find_nodes(op="output")[0].args
            for spec, output in zip(program.graph_signature.output_specs, outputs, strict=True):
                spec.arg.name = output.name
            program = program.run_decompositions({})
            _restore_shapes(program.graph)
            return program
    finally:
        hook.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch prints about its problems: whole graphs, and hints about its internals."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    was_disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = was_disabled


@contextmanager
def seen_by_tracing() -> Iterator[None]:
    """Make tracing see parts of a model that it would lose.

    These are the inside of reentrant checkpoints and of torch's own functions, the lack of gradients in inference mode, and
    source lines of functions other than forward. Meanwhile torch.manual_seed raises RuntimeError.
    """

    def apply(function: Any, _preserve_random_state: bool, *args: Any) -> Any:
        return function(*args)

    def seeded(_seed: int) -> None:
        raise RuntimeError("what a graph draws follows from the run's seed: leave torch.manual_seed out of forward")

    def enter(self: Any) -> None:
        self._inference_mode_context = torch.set_grad_enabled(torch.is_grad_enabled() and not self.mode)
        self._inference_mode_context.__enter__()

    def own_frames(_tracer: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list([frame for frame in frames if is_own(frame.filename)])

    def transparent(*_: Any) -> bool:
        return False

    asked = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    spared: dict[str, Any] = dict.fromkeys(asked, transparent)
    with (
        patch.multiple(functional, **spared),
        patch.object(torch.utils.checkpoint.CheckpointFunction, "apply", apply),
        patch.object(torch.inference_mode, "__enter__", enter),
        patch.object(torch, "manual_seed", seeded),
        patch.object(torch.fx.proxy.TracerBase, "_filter_traceback_frames", own_frames),
    ):
        yield


def _restore_shapes(graph: Any) -> None:
    """Correct the shapes of cross-entropies without reduction, and of values that follow from them.

    When it removes writes in place, torch 2.13 takes those of a batch of any size for scalars.
    """
    wrong: set[Any] = set()
    for node in graph.nodes:
        if node.target is _CROSS_ENTROPY and len(node.args) > 3 and node.args[3] == 0:
            scores, labels = (argument.meta["val"] for argument in node.args[:2])
            shape = [*scores.shape[:1], *scores.shape[2:]] if labels.is_floating_point() else labels.shape
            with scores.fake_mode:
                value = scores.new_empty(shape)
        elif node.op == "call_function" and wrong.intersection(node.all_input_nodes):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda taken: taken.meta["val"])
            with scores.fake_mode:
                value = node.target(*args, **kwargs)
        else:
            continue
        wrong.add(node)
        node.meta["val"] = value


def _open_no_grad(module: Any) -> None:
    """Put the content of no_grad regions into the graph around them, and detach its results."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or getattr(node.target, "_name", "") != _NO_GRAD:
            continue
        enabled, inner, *operands = node.args
        region = getattr(module, inner.target)
        _open_no_grad(region)
        with graph.inserting_before(node):
            given = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=True))
            before = {placeholder: graph.call_function(_CLONE, (operand,)) for placeholder, operand in given.items()}
            outputs = graph.graph_copy(region.graph, dict(given))
            outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
            (left,) = region.graph.find_nodes(op="output")[0].args
            sources = [before.get(_written(inside)) for inside in (left if isinstance(left, tuple | list) else [left])]
            if not enabled:
                outputs = [_without_gradient(graph, *pair) for pair in zip(outputs, sources, strict=True)]
        for user in list(node.users):
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()


def _written(node: Any) -> Any:
    """Return the node whose value the in-place operators that end in `node` overwrite; None if `node` is no in-place operator."""
    inside = node
    while isinstance(inside.target, torch._ops.OpOverload) and inside.target._schema.is_mutable:
        inside = inside.args[0]
    return inside if inside is not node else None


def _without_gradient(graph: Any, value: Any, source: Any) -> Any:
    """Return the value without its gradient. If it was written over the `source`, gradients flow to that as before."""
    value = graph.call_function(_DETACH, (value,))
    if source is None:
        return value
    nothing = graph.call_function(torch.ops.aten.sub.Tensor, (source, graph.call_function(_DETACH, (source,))))
    return graph.call_function(torch.ops.aten.add.Tensor, (value, nothing))


PROGRAM_SUFFIX = ".pt2"


def export_source(spec: str, *, trains: bool = True, check: bool = False) -> Exported:
    """Export the module that `spec` names, to be trained or to be served.

    Runs the code of a factory, but none of an exported program. With `check`, compares the gradients of the example batch with the
    module's own. Raises UsageError.
    """
    any_batch = True
    if spec.endswith(PROGRAM_SUFFIX):
        program, batch = load_program(Path(spec))
        any_batch = program.any_batch
        module: nn.Module = program
        example: Example = dict(zip(program.inputs, batch, strict=True))
    else:
        module, example = load_factory(spec)
    exported = export_module(module, example, any_batch=any_batch, trains=trains)
    remarks = check_gradients(module.train(), *check_example(module, example), exported) if check else ()
    return replace(exported, remarks=remarks)


def module_name(spec: str) -> str:
    """Return a name for the module that `spec` names: its factory's, or its file's."""
    return spec.rpartition(":")[2] if ":" in spec else Path(spec).stem


def load_factory(spec: str) -> tuple[nn.Module, Example]:
    """Call the function that `spec` names and return its module and example batch.

    Modules are found as Python finds them, and in the working folder.
    Raises UsageError if there is no such function, it fails, or it returns something else.
    """
    module_name, _, function_name = spec.partition(":")
    if not module_name or not function_name.isidentifier():
        raise UsageError(
            f"{spec!r} is no factory: write package.module:function, or the name of a {PROGRAM_SUFFIX} file"
        )
    try:
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        factory = getattr(importlib.import_module(module_name), function_name, None)
        if not callable(factory):
            raise UsageError(f"the module {module_name} has no function {function_name}; check its name")
        made = factory()
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{spec}: there is no module {error.name} here; is it installed, or in this folder?"
        ) from error
    except Exception as error:  # the user's own code
        raise UsageError(f"{spec} failed in {source_of(error)}: {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(f"{spec} must return a pair: a torch.nn.Module, and an example batch")
    module, example = made
    values = example.values() if isinstance(example, Mapping) else example
    if not isinstance(example, Mapping | tuple) or not all(isinstance(value, Tensor) for value in values):
        raise UsageError(
            f"{spec} must return an example batch that is a tuple of tensors, or a dict of them by argument name"
        )
    return module, example
