"""Guards: questions about values that a module accepts only one answer to, such as `if not x.isfinite().all(): raise`.

A graph has no branches, so it cannot ask a question about values. If the other answer raises, or the question is whether numbers
are finite, the answer for the example batch is assumed, and every pass is checked for it (`ranges.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
    return [
        answer if finite or (number < MOST and _raises(run, number)) else None
        for number, (answer, finite) in enumerate(zip(asked.answers, asked.about_finite, strict=True))
    ]


def _raises(run: Callable[[], Any], turned: int) -> bool:
    """Return whether `run` fails if question number `turned` about a tensor's value gets the other answer."""
    try:
        with _Questions(turned):
            run()
    except Exception:  # the module's own code may raise anything
        return True
    return False


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
                torch._assert_async(
                    args[0] if answer else args[0].logical_not(), "assumed"
                )  # without a text it is dead code
                return answer
        return function(*args, **(kwargs or {}))
