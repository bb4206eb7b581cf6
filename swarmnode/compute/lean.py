"""transformers without what serving does not use: torch's compiler, and scipy's optimisers for object detection.

transformers' modelling code imports both, for decorators and for one loss. In a process that serves they cost 70 MiB and more
than a second (measured: docs/decisions/lean-imports.md). While `lean()` lasts, stand-ins take their places; afterwards the real
modules are imported by whoever asks for them, as always.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

COMPILER = "torch._dynamo"
OPTIMISERS = "scipy.optimize"


@contextlib.contextmanager
def lean() -> Iterator[None]:
    """Import and build models with the stand-ins in place. Usable as a decorator; modules already imported stay."""
    placed = [_place(COMPILER, _compiler_stand_in), _place(OPTIMISERS, _optimisers_stand_in)]
    try:
        yield
    finally:
        for stand_in in placed:
            if stand_in is not None and sys.modules.get(stand_in.__name__) is stand_in:
                del sys.modules[stand_in.__name__]


def _place(name: str, make: Callable[[types.ModuleType], None]) -> types.ModuleType | None:
    spec = importlib.util.find_spec(name) if name not in sys.modules else None
    if spec is None:
        return None
    stand_in = types.ModuleType(name)
    stand_in.__spec__, stand_in.__file__ = spec, spec.origin
    stand_in.__path__ = list(spec.submodule_search_locations or ())  # its submodules are the real ones
    make(stand_in)
    sys.modules[name] = stand_in
    return stand_in


def _compiler_stand_in(module: types.ModuleType) -> None:
    """Decorators that tell the compiler what to leave alone: nothing is compiled, so they do nothing."""

    def leave_alone(function: Any = None, *_: Any, **__: Any) -> Any:
        return function if function is not None else leave_alone

    for name in ("disable", "allow_in_graph", "assume_constant_result", "mark_static_address"):
        setattr(module, name, leave_alone)


def _optimisers_stand_in(module: types.ModuleType) -> None:
    """The one function that transformers imports, which finds the real one when it is called."""

    def linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
        return importlib.import_module(OPTIMISERS).linear_sum_assignment(*args, **kwargs)

    module.linear_sum_assignment = linear_sum_assignment  # type: ignore[attr-defined]
