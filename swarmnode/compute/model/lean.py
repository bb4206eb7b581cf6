"""transformers without what a node does not use: torch's compiler, checkpoints of clusters, sympy, and scipy's optimisers.

transformers' modelling code imports them all, for decorators, for `isinstance` checks and for one loss. In a process that serves
they cost 100 MiB and two seconds (measured: docs/decisions/lean-imports.md). While `lean()` lasts, stand-ins take their places;
afterwards the real modules are imported by whoever asks for them, as always.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swarmnode.compute.late import LateModule

COMPILER = "torch._dynamo"
OPTIMISERS = "scipy.optimize"
SYMBOLS = "torch.fx.experimental.symbolic_shapes"
LATE = (  # packages before what is in them
    "sympy",
    SYMBOLS,
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
)
TRUTHS = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true")


@contextlib.contextmanager
def lean() -> Iterator[None]:
    """Import and build models with the stand-ins in place. Usable as a decorator; modules already imported stay."""
    placed = [_place(COMPILER, _compiler_stand_in), _place(OPTIMISERS, _optimisers_stand_in)]
    if "torch" in sys.modules:  # whose parts cannot be looked for without importing it
        placed += [_place(name, _symbols_stand_in if name == SYMBOLS else None, LateModule) for name in LATE]
    list_models_once()
    try:
        yield
    finally:
        for stand_in in placed:
            if stand_in is not None and sys.modules.get(stand_in.__name__) is stand_in:
                del sys.modules[stand_in.__name__]


def _place(
    name: str, fill: Callable[[types.ModuleType], None] | None, kind: type[types.ModuleType] = types.ModuleType
) -> types.ModuleType | None:
    """Put a stand-in where the module would be; None where the real one is imported already, or is not installed."""
    spec = importlib.util.find_spec(name) if name not in sys.modules else None
    if spec is None:
        return None
    stand_in = kind(name)
    stand_in.__spec__, stand_in.__file__ = spec, spec.origin
    stand_in.__path__ = list(spec.submodule_search_locations or ())  # its submodules are the real ones
    if fill is not None:
        fill(stand_in)
    sys.modules[name] = stand_in
    return stand_in


def list_models_once() -> None:
    """transformers reads the source of all its models for their names, some 0.4 s, and does so again when the first of them is
    wanted, as its memory holds 128 folders only. The second time it gets what the first has found."""
    utils = sys.modules.get("transformers.utils.import_utils")
    read_names: Any = getattr(utils, "create_import_structure_from_path", None)
    if "transformers.models" in sys.modules or not hasattr(read_names, "cache_info"):
        return

    def read_once(path: Any) -> Any:
        place = Path(path)
        return read_names(place.parent if place.name == "__init__.py" else path)

    utils.create_import_structure_from_path = read_once  # type: ignore[union-attr]


def _compiler_stand_in(module: types.ModuleType) -> None:
    """Decorators that tell the compiler what to leave alone: nothing is compiled, so they do nothing."""

    def leave_alone(function: Any = None, *_: Any, **__: Any) -> Any:
        return function if function is not None else leave_alone

    for name in ("disable", "allow_in_graph", "assume_constant_result", "mark_static_address"):
        setattr(module, name, leave_alone)


def _symbols_stand_in(module: types.ModuleType) -> None:
    """Questions about sizes, which torch asks at each step of a model on the meta device. Where sizes are numbers, as they are
    here, the answers are plain; symbolic ones are left to the real module, which brings all of sympy along."""

    def plain(name: str, answer: Callable[..., bool]) -> Callable[..., Any]:
        symbolic = getattr(module, name)
        return lambda *sizes: answer(*sizes) if _are_numbers(sizes) else symbolic(*sizes)

    for name in TRUTHS:
        setattr(module, name, plain(name, lambda truth, *_skipped_frames: truth))
    module.sym_and = plain("sym_and", lambda *truths: all(truths))  # type: ignore[attr-defined]
    module.sym_eq = plain("sym_eq", lambda ours, theirs: ours == theirs)  # type: ignore[attr-defined]
    module.sym_or = plain("sym_or", lambda *truths: any(truths))  # type: ignore[attr-defined]
    module.is_nested_int = plain("is_nested_int", lambda _size: False)  # type: ignore[attr-defined]


def _are_numbers(sizes: Any) -> bool:
    """Whether these are numbers, truths, or shapes of them."""
    return isinstance(sizes, int) or (isinstance(sizes, tuple) and all(map(_are_numbers, sizes)))


def _optimisers_stand_in(module: types.ModuleType) -> None:
    """The one function that transformers imports, which finds the real one when it is called."""

    def linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
        return importlib.import_module(OPTIMISERS).linear_sum_assignment(*args, **kwargs)

    module.linear_sum_assignment = linear_sum_assignment  # type: ignore[attr-defined]
