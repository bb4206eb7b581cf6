"""Write docs/errors.md from the tree of errors: `python contrib/docs/errors.py`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from swarmnode.errors import ERROR_TEXT, REMEDY, ErrorCode, SwarmnodeError

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
HEAD = """# Errors

What a command ends with, by whose fault it is: its exit code, its cause, and what to do. Written by
`contrib/docs/errors.py` from `swarmnode/errors.py`. Codes on the wire are in `protocol/errors.md`.
"""


def page() -> str:
    """Return the whole page in Markdown."""
    return "\n".join([HEAD, *_kinds(), *_codes()]) + "\n"


def _kinds() -> Iterator[str]:
    yield "| error | exit code | cause | what to do |\n|---|---|---|---|"
    for depth, kind in tree(SwarmnodeError):
        cause = " ".join((inspect.getdoc(kind) or "").split())
        yield f"| {'– ' * depth}{kind.__name__} | {kind.exit_code} | {cause} | {kind.remedy} |"


def _codes() -> Iterator[str]:
    yield "\n## What a peer answers\n\n| code | name | the peer says | what to do |\n|---|---|---|---|"
    for code in ErrorCode:
        yield f"| {code.value} | {code.name} | {ERROR_TEXT[code]} | {REMEDY[code]} |"


def tree(kind: type[SwarmnodeError], depth: int = 0) -> Iterator[tuple[int, type[SwarmnodeError]]]:
    """Yield `kind` and all its subclasses in `swarmnode/errors.py`, each with its depth in the tree."""
    yield depth, kind
    for below in kind.__subclasses__():
        if below.__module__ == SwarmnodeError.__module__:
            yield from tree(below, depth + 1)


if __name__ == "__main__":
    PAGE.write_text(page())
