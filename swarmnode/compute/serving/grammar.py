"""Grammars that generated text must follow, by llguidance: the set of tokens that may come next."""

from __future__ import annotations

import contextlib
import functools
import re
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
from transformers import GenerationConfig
from transformers.models.auto.tokenization_auto import AutoTokenizer

from swarmnode.codec.sampling import MAX_GRAMMAR_CHARS, Grammar, GrammarKind
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.files import try_apart
from swarmnode.swarm.storage.content import check_tokenizer

BURST_S, TOKEN_S = 1.0, 0.02  # of a drawing thread, which sessions share: for the first token, and for each further one
LIBRARY_BYTES = 8 << 20
TOKEN_BYTES = 2048  # of a tokenizer, for each token of the vocabulary; measured in docs/decisions/sampling.md
BOUNDS = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 8192,  # some 2 kB each
    "max_grammar_size": 50_000,
}
LIMITS = LLParserLimits(**BOUNDS)  # type: ignore[arg-type] # one of its other parameters is a bool
COMPACT: Any = {"whitespace_flexible": False}  # models that may write white space freely often write nothing else
READERS = {
    GrammarKind.JSON_SCHEMA: lambda text: LLMatcher.grammar_from_json_schema(text, defaults=COMPACT),
    GrammarKind.LARK: LLMatcher.grammar_from_lark,
    GrammarKind.REGEX: LLMatcher.grammar_from_regex,
}
# CPU time and memory of a trial; seconds that it may take in all.
TRIAL_S, TRIAL_BYTES, TRIAL_PATIENCE_S = 2, 192 << 20, 15.0
# llguidance's bounds do not hold for all that it computes before the first token: remainders, intersections of patterns. So each
# grammar is tried in a process first. Its tokens are bytes, and those that the grammar names.
TRIAL = """
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
grammar, named, size, bounds = given
class Bytes:
    tokens = [bytes([byte]) for byte in range(256)] + [name.encode() for name in named]
    tokens += [b""] * (size - len(tokens))
    special_token_ids = list(range(256, 256 + len(named)))
    eos_token_id, bos_token_id = 256, None
    def __call__(self, text):
        return list(text)
limits = LLParserLimits(**bounds)
refused, told = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
if not refused:
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=len(Bytes.tokens))
    LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
print(json.dumps(told[0] if refused else ""))
"""
NAMED = re.compile(r"<[^<>\s]+>")  # a token in Lark, by its name or (<[1-5]>) its number
MOST_NUMBERS = 1 << 19


def check_grammar(grammar: Grammar) -> None:
    """Raise ProtocolError (INVALID_REQUEST) if `grammar` cannot be read, is too large, or takes too much time or memory before the
    first token. Raise Busy if that cannot be found out now.

    It is tried in a process of its own, unless it was tried before.
    """
    if len(grammar.text.encode(errors="replace")) > MAX_GRAMMAR_CHARS:
        raise invalid(f"it has more than {MAX_GRAMMAR_CHARS:,} bytes")
    names = ["<eos>", *NAMED.findall(grammar.text)]
    if refused := _tried(read_grammar(grammar), tuple(dict.fromkeys(names))):
        raise invalid(refused)


@functools.lru_cache(256)
def _tried(grammar: str, named: tuple[str, ...]) -> str:
    """Return why a grammar in llguidance's form is refused, for a vocabulary with these tokens; empty if it is not. Raises Busy."""
    size = MOST_NUMBERS if any(name.startswith("<[") for name in named) else 0
    limits: Any = {"cpu_s": TRIAL_S, "memory_bytes": TRIAL_BYTES, "patience_s": TRIAL_PATIENCE_S}
    told = try_apart(TRIAL, [grammar, named, size, BOUNDS], **limits)
    return "it takes too much time or memory to read it; make it smaller" if told is None else str(told)


def read_grammar(grammar: Grammar) -> str:
    """Return the grammar in llguidance's form. Raises ProtocolError (INVALID_REQUEST) if it cannot be read."""
    try:
        return READERS[GrammarKind(grammar.kind)](grammar.text)
    except ValueError as error:
        raise invalid(str(error)) from None


def invalid(why: str) -> ProtocolError:
    """Return the error for a grammar that cannot be used, in one line."""
    lines = why.strip().splitlines() or ["unknown"]
    told = f"{lines[0]} {lines[-1].strip()}" if lines[0].endswith(":") else lines[0]  # the lines between show the place
    return ProtocolError(f"the grammar cannot be used: {told}", code=ErrorCode.INVALID_REQUEST)


class GrammarCompiler:
    """Compiler of grammars for the tokenizer in a checkpoint folder and its model's `vocabulary`. Used from one thread."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self._folder = folder
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None

    @property
    def loaded(self) -> bool:
        """Whether the tokenizer is in memory."""
        return self._tokenizer is not None

    @property
    def tokenizer_bytes(self) -> int:
        """Bytes of memory that loading the tokenizer takes, for good."""
        return LIBRARY_BYTES + self._vocabulary * TOKEN_BYTES

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """Return a matcher for the text of a session. The first call takes seconds, as it loads the tokenizer.

        Raises ProtocolError (INVALID_REQUEST) if the grammar cannot be used or the checkpoint has no tokenizer, Busy as
        `check_grammar` does.
        """
        check_grammar(grammar)
        matcher = LLMatcher(self._load(), read_grammar(grammar), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise invalid(matcher.get_error())
        return GrammarMatcher(matcher, self._vocabulary)

    def _load(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                check_tokenizer(self._folder)
                own: Any = AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
                ends: int | list[int] | None = None  # the generation config may name no tokens that end a text
                with contextlib.suppress(OSError, ValueError):
                    ends = GenerationConfig.from_pretrained(self._folder, local_files_only=True).eos_token_id
                self._tokenizer = from_tokenizer(own, n_vocab=self._vocabulary, eos_token=ends)
            except Exception as error:  # tokenizers raises Exception itself
                raise invalid(f"the checkpoint has no tokenizer for it: {error}") from error
        return self._tokenizer


class GrammarMatcher:
    """Matcher of one session's text: tells which tokens may follow it. Used from one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._text: list[int] = []  # tokens that the matcher has consumed
        self._spent_s = 0.0  # time of the drawing threads
        self._mask = allocate_token_bitmask(1, vocabulary)

    def allowed(self, text: Sequence[int]) -> Tensor:
        """Return allowed_V (bool): which tokens may follow `text`.

        Raises ProtocolError (INVALID_REQUEST) if none may, `text` does not follow the grammar, or finding out takes too long.
        """
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

    def forced(self, text: Sequence[int]) -> list[int]:
        """Return the tokens that must follow `text`, as nothing else may; none if several tokens may follow, or the text is
        complete.

        Raises ProtocolError (INVALID_REQUEST) if `text` does not follow the grammar.
        """
        began_s = time.thread_time()
        self._follow(text)
        tokens: list[int] = [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()
        self._spent_s += time.thread_time() - began_s
        return tokens

    def ends(self, text: Sequence[int]) -> bool:
        """Return whether the text is complete after these tokens, so that nothing may follow.

        Raises ProtocolError (INVALID_REQUEST) if `text` does not follow the grammar.
        """
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
