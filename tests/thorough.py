"""Cases that run only with `pytest --thorough`: more of a kind of which each run has some.

A run of all tests has to end within a quarter of an hour on two cores. The left-out cases take six minutes of a core.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

THOROUGH = "thorough"


def one_of(every: int, names: Iterable[str]) -> list[Any]:
    """Return all names as pytest parameters; all but each `every`-th one run only with --thorough."""
    return [
        name if number % every == 0 else pytest.param(name, marks=pytest.mark.thorough)
        for number, name in enumerate(names)
    ]
