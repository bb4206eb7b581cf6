"""Packages without contents: modules of a large package can be imported alone, without the imports of the package's `__init__`."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence


def folders_of(package: str) -> list[str]:
    """Return the folders of the package's modules without importing it; its parent packages are imported. Raises ImportError if it
    is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(f"{package} is not installed")
    # As texts: transformers has a Path among them, which no finder takes.
    return [str(folder) for folder in spec.submodule_search_locations]


def put_hollow_package(name: str, folders: Sequence[str]) -> None:
    """Register an empty package `name`: later `import name.module` finds modules in `folders` and runs no `__init__` of the
    package."""
    package = types.ModuleType(name)
    package.__path__ = list(folders)
    sys.modules[name] = package
