"""transformers without what a node does not use: torch's compiler, checkpoints of clusters, sympy, and scipy's optimisers.

transformers' modelling code imports them all, for decorators, for `isinstance` checks and for one loss. In a process that serves
they cost 100 MiB and two seconds (measured: docs/decisions/lean-imports.md). While `lean()` lasts, imports of them find stand-ins;
afterwards the real modules are imported by whoever asks for them, as always, and take over what was left to the stand-ins.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swarmnode.compute.late import LateModule, StandIns

TRUTHS = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true")


@contextlib.contextmanager
def lean() -> Iterator[None]:
    """Import and build models with the stand-ins in place. Usable as a decorator; modules already imported stay."""
    with STAND_INS.in_place(), models_listed_once():
        yield


@contextlib.contextmanager
def models_listed_once() -> Iterator[None]:
    """transformers reads the source of all its models for their names, some 0.4 s, and does so again when the first of them is
    wanted, as its memory holds 128 folders only. The second time it gets what the first has found."""
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    read_names: Any = getattr(utils, "create_import_structure_from_path", None)
    if "transformers.models" in sys.modules or not hasattr(read_names, "cache_info"):
        yield
        return

    def read_once(path: Any) -> Any:
        place = Path(path)
        return read_names(place.parent if place.name == "__init__.py" else path)

    utils.create_import_structure_from_path = read_once
    try:
        yield
    finally:
        utils.create_import_structure_from_path = read_names


def _fill_compiler(module: LateModule) -> None:
    """Decorators that tell the compiler what to leave alone: as long as nothing is compiled, they do nothing."""

    def mark(decorator: str) -> Callable[[Any], Any]:
        """Of a decorator that returns the function itself."""

        def marked(function: Any) -> Any:
            module.__put_right__.append(lambda real: getattr(real, decorator)(function))
            return function

        return marked

    def disable(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        if function is None:
            return lambda function: disable(function, *args, **kwargs)
        called = function

        @functools.wraps(function)
        def disabled(*args: Any, **kwargs: Any) -> Any:
            return called(*args, **kwargs)

        def disable_for_compiler(real: Any) -> None:
            nonlocal called
            called = real.disable(function, *args, **kwargs)

        module.__put_right__.append(disable_for_compiler)
        return disabled

    vars(module).update(
        disable=disable,
        allow_in_graph=mark("allow_in_graph"),
        assume_constant_result=mark("assume_constant_result"),
    )


def _fill_symbols(module: LateModule) -> None:
    """Questions about sizes, which torch asks at each step of a model on the meta device. Where sizes are numbers, as they are
    here, the answers are plain; symbolic ones are left to the real module, which brings all of sympy along."""

    def plain(name: str, answer: Callable[..., bool]) -> Callable[..., Any]:
        symbolic = getattr(module, name)
        return lambda *sizes: answer(*sizes) if _are_numbers(sizes) else symbolic(*sizes)

    answers: dict[str, Callable[..., bool]] = {name: lambda truth, *_skipped_frames: truth for name in TRUTHS}
    answers["sym_and"] = lambda *truths: all(truths)
    answers["sym_eq"] = lambda ours, theirs: ours == theirs
    answers["sym_or"] = lambda *truths: any(truths)
    answers["is_nested_int"] = lambda _size: False
    vars(module).update({name: plain(name, answer) for name, answer in answers.items()})


def _are_numbers(sizes: Any) -> bool:
    """Whether these are numbers, truths, or shapes of them."""
    return isinstance(sizes, int) or (isinstance(sizes, tuple) and all(map(_are_numbers, sizes)))


STAND_INS = StandIns(
    {
        "scipy.optimize": None,
        "sympy": None,
        "torch._dynamo": _fill_compiler,
        "torch.distributed._composable.fsdp": None,
        "torch.distributed.checkpoint": None,
        "torch.distributed.fsdp": None,
        "torch.fx.experimental.symbolic_shapes": _fill_symbols,
    },
    real=["torch._dynamo._trace_wrapped_higher_order_op"],  # in which transformers' masks are made
)
