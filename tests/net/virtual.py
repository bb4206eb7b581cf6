"""Tests that take minutes of virtual time and milliseconds of ours."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from swarmnode.net.memory.virtual_time import run_virtual

AsyncTest = Callable[..., Coroutine[Any, Any, None]]


def in_virtual_time(test: AsyncTest) -> Callable[..., None]:
    """Run an async test on a VirtualLoop."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        run_virtual(test(*arguments, **named))

    return run


def in_virtual_time_with(
    make: Callable[[Path], AbstractAsyncContextManager[Any]],
) -> Callable[[AsyncTest], Callable[..., None]]:
    """Run async tests on a VirtualLoop, each with what is made in its folder as the first argument."""

    async def play(test: AsyncTest, folder: Path, named: dict[str, Any]) -> None:
        async with make(folder) as made:
            await test(made, **named)

    def decorate(test: AsyncTest) -> Callable[..., None]:
        @functools.wraps(test)
        def run(tmp_path: Path, **named: Any) -> None:
            run_virtual(play(test, tmp_path, named))

        folder = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.signature(test)
        _, *named = signature.parameters.values()
        run.__signature__ = signature.replace(parameters=[folder, *named])  # type: ignore[attr-defined]  # for pytest's fixtures
        return run

    return decorate
