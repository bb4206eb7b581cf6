"""Packages without contents: modules of a large package are imported by themselves, without all that the package brings along."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence


def folders_of(package: str) -> list[str]:
    """Where a package's modules lie. It is not imported, but those it is in are. Raises ImportError where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(f"{package} is not installed")
    # As texts: transformers has a Path among them, which no finder takes.
    return [str(folder) for folder in spec.submodule_search_locations]


def put_hollow_package(name: str, folders: Sequence[str]) -> None:
    """From now on `import name.module` finds the modules in these folders, and runs nothing else."""
    package = types.ModuleType(name)
    package.__path__ = list(folders)
    sys.modules[name] = package
