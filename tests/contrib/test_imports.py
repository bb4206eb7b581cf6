"""Scripts of contrib/: each compiles, and the names that it imports from swarmnode and tests are there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contrib.script import CONTRIB, ROOT

SCRIPTS = sorted(CONTRIB.rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each name that is imported from this repository; the name is empty for a whole module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def source_of(module: str) -> Path | None:
    """Return the file of a module of this repository; None if there is none."""
    place = ROOT.joinpath(*module.split("."))
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()), None)


def names_in(file: Path) -> set[str]:
    """Return the names that a module's top level defines or imports, at any depth of `if` and `with`."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names.update(alias.asname or alias.name for alias in node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            else:
                waiting.append(node)
    return names


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(CONTRIB)))
def test_imports_are_there(script: Path) -> None:
    for module, name in imported(ast.parse(script.read_text(), str(script))):
        if module.split(".")[0] not in ("swarmnode", "tests"):
            continue
        file = source_of(module)
        assert file is not None, f"{module} is no module"
        is_there = not name or name in names_in(file) or source_of(f"{module}.{name}") is not None
        assert is_there or (file.parent / name).is_dir(), f"{module} has no {name}"
