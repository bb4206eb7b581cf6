"""No string shows a placeholder, as "{name}", to its reader because the `f` before its quote is missing."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEMPLATES = {
    "swarmnode/cli/lend/services.py": {"name", "stop", "log", "command"},  # str.format
    "swarmnode/data/conversation.py": {"tools"},  # str.format
    "swarmnode/node/node.py": {"reason"},  # str.format
    "swarmnode/simulate/results/result_page.py": {"font-weight:600"},  # CSS
    "swarmnode/terminal/progress.py": {"task.description", "task.fields[told]"},  # rich
}
"""Placeholders that something else than an f-string fills, by file"""
BRACES = re.compile(r"(?<!\\[pPx])\{([^{}]+)\}")  # not \p{L}, a class of characters in a regular expression
ROUTE = re.compile(r"/[\w./{}:-]*")


def placeholders(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each expression within braces in a string that is no f-string, docstring or HTTP route.

    Of several strings behind one another, each is taken alone: some may be f-strings.
    """
    statements = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    docstrings = {(node.lineno, node.col_offset) for node in statements if isinstance(node, ast.Constant)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.STRING or token.start in docstrings:
            continue
        prefix = token.string.partition(token.string[-1])[0].lower()
        if "f" in prefix or "b" in prefix:
            continue
        text = str(ast.literal_eval(token.string))
        if ROUTE.fullmatch(text):
            continue
        if _is_program(text):
            yield from ((token.start[0] + line - 1, inner) for line, inner in placeholders(text))
            continue
        for inner in BRACES.findall(text.replace("{{", "").replace("}}", "")):
            if _is_expression(inner):
                yield token.start[0], inner


def _is_program(text: str) -> bool:
    """Return whether a text is a Python program, as for a process of its own; its f-strings are looked through as such."""
    try:
        return any(isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom) for node in ast.parse(text).body)
    except SyntaxError:
        return False


def _is_expression(inner: str) -> bool:
    """Return whether a text is what an f-string may have in braces, with a name in it."""
    expression = re.sub(r"(=|![rsa])?(:(.?[<>=^])?[+\- ]?#?0?\d*[,_]?(\.\d+)?[a-zA-Z%]?)?$", "", inner, count=1)
    try:
        parsed = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.Name) for node in ast.walk(parsed))


def test_no_string_lacks_its_f() -> None:
    found: dict[str, set[str]] = {}
    lines = []
    for path in sorted((ROOT / "swarmnode").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for line, inner in placeholders(path.read_text()):
            if inner in TEMPLATES.get(name, ()):
                found.setdefault(name, set()).add(inner)
            else:
                lines.append(f"{name}:{line}: {{{inner}}}")
    assert lines == [], "write an f before the quote, or add the template to TEMPLATES"
    assert found == TEMPLATES, "these templates are gone"


@pytest.mark.parametrize(
    "source",
    [
        'x = "of {name}"',
        'x = (f"of {a}"\n "and {name}")',
        'x = ("and {name}"\n f"of {a}")',
        "fail('no {path.name}, {error.strerror or error}')",
        'x = r"{name!r:>10}"',
        'x = "{len(rows):,} rows"',
        'x = """\n{name}"""',
        'def f():\n    """Return."""\n    return "{self.x[0]}"',
        'x = "{rows + 1} and {{}}"',
    ],
)
def test_a_missing_f_is_found(source: str) -> None:
    assert [*placeholders(source)]


@pytest.mark.parametrize(
    "source",
    [
        'x = f"of {name}"',
        'x = f"{{name}}" rf"{name}"',
        '"""Of {name}."""',
        'get("/v1/{name:path}/x")',
        r'x = r"\p{L}{1,3}[a-z]{2,}"',
        "x = '{\"a\": 1}'",
        'x = "{% if a %}{{ a }}{% endif %}"',
        'x = b"{name}"',
        'x = "{}, {0}"',
    ],
)
def test_other_braces_are_left_alone(source: str) -> None:
    assert [*placeholders(source)] == []
