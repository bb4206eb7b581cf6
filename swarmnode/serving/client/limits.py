"""Limits of a model: its token ids and positions. The client checks requests against them before it sends anything."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from swarmnode.codec.body import MAX_POSITIONS, MAX_ROWS, MAX_TOKEN_ID
from swarmnode.codec.sampling import Grammar
from swarmnode.codec.tensors import check_compression
from swarmnode.errors import ContextTooLong, ProtocolError, UsageError
from swarmnode.serving.client.generation import GenerateOptions
from swarmnode.swarm.records.manifest import SERVING_CODECS

MAX_TOKEN_CHARS = 128  # the longest tokens are rows of spaces, up to this many


@dataclass(frozen=True)
class ModelLimits:
    """Limits of one model. `vocabulary`: number of token ids; `positions`: longest sequence; None: not known.

    `codecs`: codecs allowed for its states.
    """

    vocabulary: int | None = None
    positions: int | None = None
    codecs: tuple[int, ...] = SERVING_CODECS

    def ids(self, prompt: Iterable[object]) -> list[int]:
        """Return the prompt as a list of token ids. Raises UsageError if it is empty or has an id that the model does
        not have."""
        ids = [_whole(token) for token in prompt]
        if not ids:
            raise UsageError("the prompt has no tokens; give at least one")
        self.check_ids(min(ids), max(ids))
        return ids

    def check_ids(self, lowest: int, highest: int) -> None:
        """Raise UsageError if a token id from `lowest` to `highest` is not one of the model's."""
        if lowest < 0:
            raise UsageError(f"token id {lowest} is negative: token ids count from 0")
        if self.vocabulary is not None and highest >= self.vocabulary:
            raise UsageError(
                f"token id {highest} is not in the model's vocabulary of {self.vocabulary}; use the model's tokenizer"
            )
        if highest > MAX_TOKEN_ID:
            raise UsageError(f"token id {highest} is not in any model's vocabulary; use the model's tokenizer")

    def check_text(self, chars: int) -> None:
        """Raise ContextTooLong if a prompt of `chars` characters is too long in any tokenization, without tokenizing it
        for seconds."""
        if self.positions is not None and chars > self.positions * MAX_TOKEN_CHARS:
            raise ContextTooLong(
                f"the prompt has {chars:,} characters, the model has {self.positions:,} positions: shorten it"
            )

    def check_generation(self, prompt_length: int, new_tokens: int) -> None:
        """Raise ContextTooLong if the prompt and `new_tokens` do not fit. The last new token needs no position."""
        positions = self._bound
        if prompt_length > positions:
            raise ContextTooLong(
                f"the prompt has {prompt_length} tokens, the model has {positions} positions: shorten it"
            )
        if prompt_length + new_tokens - 1 > positions:
            raise ContextTooLong(
                f"the prompt's {prompt_length} tokens and {new_tokens} new ones do not fit into the model's {positions} "
                f"positions: ask for at most {self.most_new_tokens(prompt_length)} new tokens, or shorten the prompt"
            )

    def most_new_tokens(self, prompt_length: int) -> int:
        """Return the largest number of new tokens after a prompt of `prompt_length` tokens; below 1 if none fit. The
        last needs no position."""
        return self._bound - prompt_length + 1

    async def check_options(self, options: GenerateOptions) -> None:
        """Raise UsageError if the model or the swarm cannot fulfil `options`.

        That is: the swarm does not allow this compression, a bias is for an unknown token, or the grammar is invalid.
        """
        check_compression(options.compress, self.codecs)
        if options.logit_bias:
            self.check_ids(min(options.logit_bias), max(options.logit_bias))
        if options.grammar is not None:
            await asyncio.get_running_loop().run_in_executor(_checks, _check_grammar, options.grammar)

    def check_session(self, rows: int, length: int) -> None:
        """Raise UsageError if no session can have `rows` rows of `length` positions."""
        if not 1 <= rows <= MAX_ROWS:
            raise UsageError(f"{rows} sequences at once are not possible: use 1 to {MAX_ROWS} (batch x beams)")
        if not 1 <= length <= self._bound:
            raise UsageError(
                f"{length} positions were asked for, the model has {self._bound}: shorten prompt or max_new_tokens"
            )

    def room(self, length: int) -> int:
        """Return `length` and one more position to spare, if the model has it."""
        return length + 1 if length < self._bound else length

    @property
    def _bound(self) -> int:
        return MAX_POSITIONS if self.positions is None else min(self.positions, MAX_POSITIONS)


_checks = ThreadPoolExecutor(
    2, thread_name_prefix="swarmnode-grammars"
)  # not those of all other work: some take seconds


def _check_grammar(grammar: Grammar) -> None:
    """Raise UsageError if the grammar is invalid. The import is here because few texts have a grammar."""
    from swarmnode.compute.serving.grammar import check_grammar

    try:
        check_grammar(grammar)
    except ProtocolError as error:
        raise UsageError(str(error)) from error


def _whole(token: object) -> int:
    try:
        return operator.index(token)  # type: ignore[arg-type] # TypeError is the answer for other types
    except TypeError:
        raise UsageError(f"a prompt is a text, or token ids: {token!r} is neither") from None
