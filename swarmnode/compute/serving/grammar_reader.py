"""Reading grammars, without a tokenizer: asked of by who sends one, and by who is sent one.

What a grammar may cost is bounded by llguidance's own counts of work, not by time: the same one is refused everywhere.
"""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLParserLimits

from swarmnode.codec.sampling import Grammar, GrammarKind
from swarmnode.errors import ErrorCode, ProtocolError

LIMITS = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=8192,  # some 2 kB each
    max_grammar_size=50_000,
)
COMPACT: Any = {
    "whitespace_flexible": False
}  # models that may write as much white space as they like often do nothing else
READERS = {
    GrammarKind.JSON_SCHEMA: lambda text: LLMatcher.grammar_from_json_schema(text, defaults=COMPACT),
    GrammarKind.LARK: LLMatcher.grammar_from_lark,
    GrammarKind.REGEX: LLMatcher.grammar_from_regex,
}


def check_grammar(grammar: Grammar) -> None:
    """Raises ProtocolError, INVALID_REQUEST, where it is none, or too large a one."""
    refused, told = LLMatcher.validate_grammar_with_warnings(read_grammar(grammar), limits=LIMITS)
    if refused:
        raise invalid(told[0])


def read_grammar(grammar: Grammar) -> str:
    """As llguidance takes it. Raises ProtocolError, INVALID_REQUEST."""
    try:
        return READERS[GrammarKind(grammar.kind)](grammar.text)
    except ValueError as error:
        raise invalid(str(error)) from None


def invalid(why: str) -> ProtocolError:
    """The error of a grammar that cannot be used, in one line."""
    lines = why.strip().splitlines() or ["unknown"]
    told = f"{lines[0]} {lines[-1].strip()}" if lines[0].endswith(":") else lines[0]  # between them it shows where
    return ProtocolError(f"the grammar cannot be used: {told}", code=ErrorCode.INVALID_REQUEST)
