"""Gradient check: one backward pass of a graph against the module's own, before a swarm is founded on it.

Tracing sees only the forward computation. It loses a backward pass that the author wrote or changed (autograd.Function, hooks).

Results of a module for its example batch, as the results of a graph: its mean loss, or its outputs by name.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from swarmnode.compute.graph.exporting.reader import Exported, source_of
from swarmnode.compute.graph.graph_segment import GraphSegment
from swarmnode.compute.training.segment import Values
from swarmnode.errors import SwarmnodeError, UsageError

OUTPUT = "output"  # name of the output of a module that returns one tensor


class Loss(nn.Module):
    """Wrapper of a module whose forward returns only the loss, found in the module's output."""

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
    """Wrapper of a module that returns its tensors by name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        output = self.module(*args, **kwargs)
        named = dict(_named(output, "", type(self.module).__name__))
        if not named:
            raise UsageError(
                f"{type(self.module).__name__} returned no tensor for the example batch; return at least one"
            )
        return named


def _named(value: Any, name: str, module: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a module's result, named by the keys and numbers that lead to them, as "hidden_states_2"; a lone
    tensor is named `OUTPUT`. None is left out.

    Raises UsageError for other results than tensors.
    """
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


NOT_CHECKED = "gradients not checked"
# Differences that rounding may make: shares of the parameter's gradient, and of the largest one.
OWN, LARGEST = 1e-3, 1e-5
LOSS = 1e-4
STEEP = 1024.0  # factor of a second loss: it shows a backward pass that is not linear
NUDGE = 0.1
COPIES = 6  # of the trained parameters: two sets of gradients, the previous values, and room for activations

Gradients = dict[str, Tensor]
"""Gradients by the parameter's name; none for parameters that the loss does not depend on"""


def check_gradients(
    module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], exported: Exported
) -> tuple[str, ...]:
    """Compare loss and gradients of the example batch, and return remarks for the founder.

    The remarks are empty if all was compared, else say that memory does not suffice. Raises UsageError if nothing is trained, the
    loss or a gradient differs, or the loss is a sum over the batch.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise UsageError(f"{type(module).__name__} has no parameter that is trained: set requires_grad")
    needed = COPIES * sum(parameter.nbytes for parameter in trained)
    available = psutil.virtual_memory().available
    if needed > available:
        return (f"{NOT_CHECKED}: that takes {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} are free",)
    _Check(module, args, kwargs, exported).run()
    return ()


class SameDraws(TorchDispatchMode):
    """Mode that reseeds before each random draw, so that a draw depends only on its own size, not on earlier draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, after reseeding if it draws."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(0)
        return func(*args, **(kwargs or {}))


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Restore parameters, gradients, buffers, modes and the random state of `module` after the `with` block."""
    tensors = [*module.parameters(), *module.buffers()]
    kept = [(tensor, tensor.detach().clone(), tensor.grad) for tensor in tensors]
    training = {name: part.training for name, part in module.named_modules()}
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for tensor, value, gradient in kept:
            tensor.data.copy_(value)
            tensor.grad = gradient
        for name, part in module.named_modules():
            part.training = training[name]


@contextmanager
def _same_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers after the `with` block, so that the next pass begins with the same values."""
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.data.copy_(value)


class _Check:
    def __init__(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], exported: Exported
    ) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs
        self.name = type(module).__name__
        self.results = Loss(module)
        self.parameters = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
        device = next(iter(self.parameters.values())).device
        graph = self.graph = exported.graph
        self.segment = GraphSegment(graph, exported.weights, 0, graph.units, device=device, counts_dropout=False)
        given = dict(zip((item.name for item in graph.inputs), (*args, *kwargs.values()), strict=True))
        self.inputs: Values = tuple(given[value.ref.name] for value in self.segment.layout.boundaries[0])
        self.functions: set[type] = set()  # autograd.Functions that the loss went through

    def run(self) -> None:
        """Run all comparisons. Raises UsageError if one fails."""
        with untouched(self.module), SameDraws():
            own = self._compare(1.0)
            if self.functions:
                self._compare(STEEP)
            if any(name not in own or not own[name].any() for name in self.parameters):
                # Some have no gradient: others' values may keep their gradients at zero. So all move a little.
                for parameter in self.parameters.values():
                    spread = max(float(parameter.std(correction=0)), NUDGE)
                    parameter.data.add_(torch.randn_like(parameter), alpha=NUDGE * spread)
            self._compare(1.0)
        with untouched(self.module), SameDraws(), torch.no_grad():
            self._check_mean()

    def _compare(self, scale: float) -> Gradients:
        """Compare the gradients that the graph and the module itself compute for the loss times `scale`; return the module's.
        Raises UsageError if they or the losses differ, or if the module cannot be trained."""
        with _same_buffers(self.module):
            loss = self._own_loss()
            try:
                own = _gradients(loss, scale, self.parameters)
            except RuntimeError as error:
                told = " ".join(str(error).split())
                raise UsageError(
                    f"{self.name} cannot be trained, as its own backward pass fails: {told}; correct the module"
                ) from error
        with _same_buffers(self.module):
            try:
                (traced,) = self.segment.forward(self.inputs, 0, self.graph.units, 0)
            except (RuntimeError, SwarmnodeError) as error:  # of an operator that the module's own kernels do not use
                raise UsageError(
                    f"the graph of {self.name} fails on the example batch: "
                    f"{' '.join(str(error).split())}; correct the module or the batch"
                ) from error
            held = {name: tensor for named in self.segment.parameters().values() for name, tensor in named.items()}
            traced_gradients = _gradients(traced, scale, held)
        if not loss.isfinite():
            return own  # the nudge may leave the range that the module is made for
        if abs(traced.item() - loss.item()) > LOSS * max(1.0, abs(loss.item())):
            raise UsageError(
                f"the graph of {self.name} gives the loss {traced.item():.6g} for the example batch, and the module itself "
                f"{loss.item():.6g}: something in it differs from pass to pass, or is "
                "not computed by torch; use torch alone, and keep no state between passes"
            )
        largest = max((float(gradient.norm()) for gradient in own.values()), default=0.0)
        for name, parameter in self.parameters.items():
            nothing = torch.zeros_like(parameter)
            wanted, given = own.get(name, nothing), traced_gradients.get(name, nothing)
            if not (wanted - given).norm() <= OWN * wanted.norm() + LARGEST * largest:
                raise UsageError(
                    f"{self.name} cannot be trained as a graph: the gradient of {name} is not the module's own, "
                    f"for {self._reason()}"
                )
        return own

    def _own_loss(self) -> Tensor:
        """Return the module's loss of the example batch, with its graph.

        Raises UsageError if it fails, has no gradient, or draws from other random generators than torch's.
        """
        before = _foreign_draws()
        try:
            loss: Tensor = self.results(self.args, self.kwargs)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"{self.name} failed in {source_of(error)}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            ) from error
        if _foreign_draws() != before:
            raise UsageError(f"{self.name} draws from random or numpy.random, which a graph cannot: draw by torch.rand")
        if not loss.requires_grad:
            raise UsageError(f"the loss of {self.name} depends on no parameter that is trained: {self._reason()}")
        self.functions |= _functions(loss)
        return loss

    def _reason(self) -> str:
        names = sorted(function.__name__ for function in self.functions)
        if CheckpointFunction.__name__ in names:
            return (
                "checkpoint(use_reentrant=True) trains nothing where no input takes a gradient; say use_reentrant=False"
            )
        if names:
            return f"the autograd.Function {names[0]} goes back in a way of its own; write it with operators of torch"
        return "something in it changes gradients on their way back, or is not differentiable; use operators of torch alone"

    def _check_mean(self) -> None:
        """Raise UsageError if the loss is twice as large when each sample comes twice."""
        try:
            once, twice = (self._evaluated(times) for times in (1, 2))
        except Exception:  # the module may know no other batch, and no evaluation
            return
        if abs(once) > 1e-6 and math.isclose(twice, 2 * once, rel_tol=OWN):
            raise UsageError(
                f"the loss of {self.name} is a sum over the batch, as it is twice as large for each sample twice: "
                "forward must give the mean, so divide the loss by the number of samples"
            )
        if abs(once) > 1e-6 and math.isclose(2 * twice, once, rel_tol=OWN):
            raise UsageError(
                f"the loss of {self.name} is divided by the number of samples twice, as it is half as large for each sample twice: "
                "forward must give the mean"
            )

    def _evaluated(self, times: int) -> float:
        """Return the loss of the example batch with each sample repeated `times` times, without dropout."""
        self.module.eval()
        batch = self.graph.batch

        def repeated(value: Tensor) -> Tensor:
            return torch.cat([value] * times) if value.dim() and value.shape[0] == batch else value

        loss: Tensor = self.results(
            tuple(map(repeated, self.args)), {name: repeated(value) for name, value in self.kwargs.items()}
        )
        return loss.item()


def _foreign_draws() -> tuple[Any, ...]:
    """Return the states of the random generators of Python and numpy."""
    state = np.random.get_state(legacy=False)
    return random.getstate(), str(state)


def _gradients(loss: Tensor, scale: float, parameters: Mapping[str, Tensor]) -> Gradients:
    """Return the gradients of the parameters that the loss depends on, divided by `scale`."""
    for parameter in parameters.values():
        parameter.grad = None
    loss.backward(torch.full_like(loss, scale))
    found = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    return {name: (gradient.to_dense() if gradient.is_sparse else gradient) / scale for name, gradient in found.items()}


def _functions(loss: Tensor) -> set[type]:
    """Return the autograd.Functions in the graph of a loss."""
    found: set[type] = set()
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            found.add(node._forward_cls)
        left += [following for following, _ in node.next_functions]
    return found
