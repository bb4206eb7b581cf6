"""Tests that take minutes of virtual time and milliseconds of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

from swarmnode.net.memory.virtual_time import run_virtual


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on a VirtualLoop."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        run_virtual(test(*arguments, **named))

    return run
