"""Passes on the CPU as flat programs: what a family's own forward asks torch to compute, without its modules.

A pass is recorded once, at fixed places in memory. torch tells of each operator, and ggml's products and attention of themselves.
Views cost nothing afterwards, as their memory stays where it is. All other operators write into the results of the recorded pass.
Packed models with fast products are computed by graphs of ggml instead (`graph_passes.py`), unless something keeps them from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swarmnode.compute.packing.ggml import library
from swarmnode.compute.packing.ggml_matrix import GgmlMatrix, threads

Call = Callable[[], object]
REFUSED = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
SHORT: dict[str, Any] = {
    "silu": torch._C._nn.silu,
    **{
        name: getattr(torch, name) for name in ("mul", "add", "sub", "neg", "rsqrt", "pow", "cat", "mean", "cos", "sin")
    },
    **{name: getattr(Tensor, name) for name in ("index_copy_", "copy_", "mul_", "add_")},
}
"""torch's own functions for common operators, whose calls take half the time of the dispatcher's"""
COPIES = ("contiguous", "clone", "_to_copy", "to")  # operators that give their first argument's values


class CannotBeRecorded(Exception):
    """The pass needs values of tensors on the host, or random numbers: another pass may go another way."""


class FlatProgram:
    """Recorded pass. It reads and writes the memory of the pass that was recorded."""

    def __init__(self, calls: Sequence[Call], kept: Sequence[Tensor]) -> None:
        self._calls = list(calls)
        self._kept = list(kept)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        self.nbytes = sum(storages.values())

    def __repr__(self) -> str:
        return f"FlatProgram({len(self._calls)} calls, {self.nbytes / 1e6:.1f} MB)"

    def run(self) -> None:
        """Compute the pass again. Raises RuntimeError if an operator fails."""
        for call in self._calls:
            call()


class Recorder(TorchDispatchMode):
    """Recorder of one pass: `with Recorder() as recorder: …`, then `program()`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[Call] = []
        self._kept: list[Tensor] = []
        self._is_paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler, which takes 100 MB and two seconds."""
        return False

    def __enter__(self) -> Recorder:
        if library() is not None:
            threads().recorder = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if library() is not None:
            threads().recorder = None

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        result = function(*args, **given)
        if not self._is_paused:
            self._record(function, args, given, result)
        return result

    def _record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        inputs, results = _tensors((*args, *kwargs.values())), _tensors([result])
        if _is_suspicious(function) and not _is_harmless(function, args, kwargs, inputs):
            raise CannotBeRecorded(f"{function} depends on values, or on random numbers")
        name = function._schema.name.split("::")[1]
        if function._schema.is_mutable:
            self.record_call(partial(SHORT.get(name, function._op), *args, **kwargs))
            return
        known = {_storage(each) for each in inputs}
        fresh = [tensor for tensor in results if _storage(tensor) not in known]
        self._kept += fresh
        if fresh and not name.startswith("empty") and not name.startswith("new_empty"):
            self.record_call(_again(function, name, args, kwargs, results))

    def record_call(self, call: Call) -> None:
        """Take a call, made in the recorded pass, into the program."""
        self._calls.append(call)

    def calling(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return function(x), and take its call as a whole into the program."""
        self._is_paused, threads().recorder = True, None
        try:
            y = function(x)
        finally:
            self._is_paused, threads().recorder = False, self
        self._kept += [x, y]
        self.record_call(lambda: y.copy_(function(x)))
        return y

    def product(self, matrix: GgmlMatrix, x_RI: Tensor) -> Tensor:
        """Return the fast product (R, O) of a matrix, and take it into the program."""
        return self.calling(matrix.multiply, x_RI)

    def program(self) -> FlatProgram:
        """Return the program of the recorded calls."""
        return FlatProgram(self._calls, self._kept)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments or results, also those in lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, Tensor)]
    return found


@lru_cache(maxsize=1024)
def _is_suspicious(function: Any) -> bool:
    return any(tag in function.tags for tag in REFUSED)


def _is_harmless(function: Any, args: Sequence[Any], kwargs: dict[str, Any], inputs: Sequence[Tensor]) -> bool:
    """Return whether an operator that may depend on values does not: a look-up by numbers, or attention without dropout."""
    if "index" in function.name():
        return all(tensor.dtype is not torch.bool for tensor in inputs[1:])
    given = _by_name(function, args, kwargs)
    if "dot_product" in function.name():
        return not given.get("dropout_p")
    return "dropout" in function.name() and not (given.get("p") and given.get("train"))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _by_name(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by their names in its schema."""
    return dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs


def _again(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> Call:
    """Return a call that computes an operator again, into the results that it gave."""
    if name in COPIES and len(results) == 1:
        return partial(results[0].copy_, args[0])
    into = _with_out(function)
    if into is not None and len(results) == len(into[1]):
        return partial(SHORT.get(name, into[0]), *args, **kwargs, **dict(zip(into[1], results, strict=True)))

    def compute() -> None:
        for result, new in zip(results, _tensors([function._op(*args, **kwargs)]), strict=True):
            result.copy_(new)

    return compute


@lru_cache(maxsize=1024)
def _with_out(function: Any) -> tuple[Any, tuple[str, ...]] | None:
    """Return the form of an operator that writes into given tensors, and the names of these arguments; None if it has none."""
    wanted = [(argument.name, str(argument.type)) for argument in function._schema.arguments]
    packet = function.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        outs = [argument.name for argument in other._schema.arguments if argument.is_out]
        rest = [(argument.name, str(argument.type)) for argument in other._schema.arguments if not argument.is_out]
        if outs and rest == wanted:
            return other._op, tuple(outs)
    return None
