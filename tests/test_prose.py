"""The English of the project: docstrings, comments, help texts, errors, log lines and Markdown that a stranger understands.

`python -m tests.test_prose PATH…` lists the findings of some files.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
MAX_SHARE = 0.03  # of the texts may have a finding: some phrases are right in their place
MAX_WORDS = 32  # in a sentence

# A docstring begins with a verb or a noun. These words only stand for a noun, or join two sentences.
_QUESTIONS = "what who whom whose which how where when why whoever whatever"
_PRONOUNS = (
    "it its they them their these those this that one ones each another other nothing nobody anybody somebody everybody"
)
_JOINERS = "so as of until by from in for with to too here there if and or but not"
OPENERS = frozenset(f"{_QUESTIONS} {_PRONOUNS} {_JOINERS}".split())
_VERBS = "asks|comes|is|has|holds|wants|sends|gives|fails|feeds|computes|reads|says|did|does|was|had|can|goes"
PHRASES = {  # phrase -> the advice
    r"\bso (?:many|much|long|often|few|large|far)\b(?! (?:that|as)\b)": "name the number or the parameter",
    r"\b(?:is|are|was|were|be) told\b": "say which part reports to which",
    rf"\b(?:who|whoever|what|whatever) (?:{_VERBS})\b": "name the role: client, sender, holder",
    r"\b(?:nobody|anybody|somebody|everybody)\b": "name the role: no peer, any client",
    r"\bthat (?:is|are) (?:there|meant|missing|left|given|held|wanted|known)\b": "put an adjective before the noun",
    r"\bwhere (?:there (?:is|are)|it is|one is|they are|none|some)\b": "begin with 'if' and name the condition",
    r"\b(?:of|for|in|by|to|with|from) (?:whom|which)\b": "write two sentences",
    r"\bas (?:far|soon|long|often|well) as (?:it|that|they|one)\b": "name the noun",
}
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_MARKERS = ("noqa", "type: ignore", "pragma", "nosec")  # comments for tools
_LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception"})


class Text(NamedTuple):
    """Text of a file: its line, its words, and whether it must open with a verb or a noun."""

    line: int
    words: str
    titled: bool


def sentences(words: str) -> list[str]:
    """Split `words` at full stops, colons, blank lines and list items; code and addresses count as one word."""
    words = re.sub(r"```.*?```", " ", words, flags=re.S)
    words = re.sub(r"`[^`]*`|\[([^\]]*)\]\([^)]*\)|https?://\S+", r" X \1 ", words)
    return [part for part in re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*[-|#>]", words) if _WORD.search(part)]


def findings(text: Text) -> Iterator[str]:
    """Yield the advice for each broken rule."""
    opening = _WORD.search(text.words)
    if text.titled and opening and opening.group().lower() in OPENERS:
        yield f"it begins with {opening.group()!r}: begin with a verb or a noun"
    for phrase, advice in PHRASES.items():
        if found := re.search(phrase, text.words, re.IGNORECASE):
            yield f"{found.group()!r}: {advice}"
    for sentence in sentences(text.words):
        if (count := len(_WORD.findall(sentence))) > MAX_WORDS:
            yield f"a sentence of {count} words: {' '.join(sentence.split()[:6])} …"


def literal(node: ast.expr) -> str:
    """Return the text of a string or an f-string, with X for each inserted value; empty for other expressions."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else " X " for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def statements_texts(node: ast.AST) -> Iterator[Text]:
    """Yield the texts that belong to one node of a syntax tree."""
    match node:
        case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            if words := ast.get_docstring(node):
                yield Text(node.body[0].lineno, words, True)
            for before, after in itertools.pairwise(node.body):
                described = isinstance(before, (ast.Assign, ast.AnnAssign)) and isinstance(after, ast.Expr)
                if described and (words := literal(after.value)):
                    yield Text(after.lineno, words, True)
        case ast.keyword(arg="help", value=value):
            if words := literal(value):
                yield Text(value.lineno, words, True)
        case ast.Raise(exc=ast.Call(args=args)):
            yield from (Text(node.lineno, words, False) for arg in args if len((words := literal(arg)).split()) > 3)
        case ast.Call(func=ast.Attribute(attr=method), args=[message, *_]) if method in _LOG_METHODS:
            if len((words := literal(message)).split()) > 3:
                yield Text(node.lineno, words, False)


def python_texts(path: Path) -> list[Text]:
    """List docstrings, attribute docs, help texts, errors, log lines and comments of a Python file."""
    found = [text for node in ast.walk(ast.parse(path.read_text())) for text in statements_texts(node)]
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            words = token.string.lstrip("#: ")
            if token.type == tokenize.COMMENT and len(words) > 12 and not words.startswith(_MARKERS):
                found.append(Text(token.start[0], words, False))
    return sorted(found)


def markdown_texts(path: Path) -> list[Text]:
    """List paragraphs and table rows of a Markdown file; blocks of code are left out."""
    found, line = [], 1
    for block in re.split(r"(\n\s*\n)", path.read_text()):
        if block.strip() and not block.lstrip().startswith(("```", "    ")):
            parts = block.splitlines() if block.lstrip().startswith("|") else [block]
            found += [Text(line + number, part, False) for number, part in enumerate(parts)]
        line += block.count("\n")
    return found


def files_of(paths: Iterable[Path]) -> list[Path]:
    """List the Python and Markdown files at and below `paths`."""
    return [
        file
        for path in paths
        for file in ([path] if path.is_file() else sorted(path.rglob("*")))
        if file.suffix in (".py", ".md")
    ]


def examine(paths: Iterable[Path]) -> tuple[list[str], float]:
    """Return the findings of all files, a line each, and the share of texts that have at least one."""
    lines, texts, faulty = [], 0, 0
    for file in files_of(paths):
        for text in python_texts(file) if file.suffix == ".py" else markdown_texts(file):
            advices = list(findings(text))
            lines += [f"{file}:{text.line}: {advice}" for advice in advices]
            texts, faulty = texts + 1, faulty + bool(advices)
    return lines, faulty / max(texts, 1)


@pytest.mark.parametrize(
    "parts", [("swarmnode", "contrib"), ("docs", "README.md", "protocol", "CHANGELOG.md")], ids=["code", "pages"]
)
def test_few_texts_break_a_rule(parts: tuple[str, ...]) -> None:
    lines, share = examine(ROOT / part for part in parts)
    assert share <= MAX_SHARE, "\n".join([f"{share:.1%} of the texts, at most {MAX_SHARE:.0%}:", *lines])


@pytest.mark.parametrize(
    "words",
    [
        "So many microbatches.",
        "It is asked nothing any more.",
        "Ask whoever holds it.",
        "Return the peer from which it came.",
        "word " * 33,
    ],
)
def test_a_text_that_breaks_a_rule_is_found(words: str) -> None:
    assert list(findings(Text(1, words, True)))


def test_a_plain_text_has_no_finding() -> None:
    assert not list(findings(Text(1, "Return whether `peer` is banned or backing off.", True)))


if __name__ == "__main__":
    listed, share_of_texts = examine(map(Path, sys.argv[1:]))
    print(*listed, f"{share_of_texts:.1%} of the texts have a finding", sep="\n")
