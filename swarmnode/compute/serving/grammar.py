"""Grammars that generated text must follow, by llguidance: of all tokens, those that may come next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from swarmnode.codec.sampling import Grammar, GrammarKind
from swarmnode.errors import ErrorCode, ProtocolError

BURST_S, TOKEN_S = 1.0, 0.02  # of a thread that draws, which sessions share: at first, and for each token
LIBRARY_BYTES = 8 << 20
TOKEN_BYTES = 2048  # of a tokenizer, for each token of the vocabulary; measured in docs/decisions/sampling.md
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


class GrammarCompiler:
    """For the tokenizer of a checkpoint folder and the `vocabulary` of its model. Used from one thread, once it is made."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self._folder = folder
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None

    def __repr__(self) -> str:
        return f"<GrammarCompiler for {self._vocabulary} tokens>"

    @property
    def loaded(self) -> bool:
        """Whether the tokenizer is in memory."""
        return self._tokenizer is not None

    @property
    def tokenizer_bytes(self) -> int:
        """Of memory that loading the tokenizer takes, for good."""
        return LIBRARY_BYTES + self._vocabulary * TOKEN_BYTES

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """What follows the text of a session. The first one takes seconds: it brings the tokenizer. Raises ProtocolError,
        INVALID_REQUEST."""
        matcher = LLMatcher(self._load(), read_grammar(grammar), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise invalid(matcher.get_error())
        return GrammarMatcher(matcher, self._vocabulary)

    def _load(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                own: Any = AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
                self._tokenizer = from_tokenizer(own, n_vocab=self._vocabulary, eos_token=_end_ids(self._folder))
            except (OSError, ValueError, KeyError) as error:
                raise invalid(f"the checkpoint has no tokenizer for it: {error}") from error
        return self._tokenizer


def _end_ids(folder: Path) -> int | list[int] | None:
    """The tokens that end a text; None where only the tokenizer may know."""
    try:
        ids: int | list[int] | None = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except (OSError, ValueError):
        return None
    return ids


class GrammarMatcher:
    """Which tokens may follow the text of one session. Used from one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._text: list[int] = []  # that it has followed
        self._spent_s = 0.0  # of the threads that draw
        self._mask = allocate_token_bitmask(1, vocabulary)

    def __repr__(self) -> str:
        return f"<GrammarMatcher after {len(self._text)} tokens>"

    def allowed(self, text: Sequence[int]) -> Tensor:
        """allowed_V (bool) after these tokens. Raises ProtocolError, INVALID_REQUEST: none is, or that takes too much."""
        began_s = time.thread_time()
        self._follow(text)
        fill_next_token_bitmask(self._matcher, self._mask, 0)
        self._spent_s += time.thread_time() - began_s
        if self._spent_s > BURST_S + len(text) * TOKEN_S:
            raise invalid("it takes too long to find the tokens that may follow")
        if self._matcher.is_error():
            raise invalid(self._matcher.get_error())
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        allowed_V = torch.from_numpy(bits[: self._vocabulary].astype(np.bool_))
        if not bool(allowed_V.any()):
            raise invalid("nothing may follow")
        return allowed_V

    def ends(self, text: Sequence[int]) -> bool:
        """Whether the text is whole after these tokens, and nothing may follow."""
        self._follow(text)
        return bool(self._matcher.is_stopped())

    def _follow(self, text: Sequence[int]) -> None:
        if self._text != list(text[: len(self._text)]):
            self._matcher.reset()
            self._text = []
        fresh = list(text[len(self._text) :])
        if fresh and not self._matcher.consume_tokens(fresh):
            raise invalid(self._matcher.get_error() or "the text so far does not follow it")
        self._text += fresh
