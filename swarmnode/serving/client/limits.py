"""What a model can be asked for: its token ids and positions. Checked at the client, before anything is sent."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Iterable
from dataclasses import dataclass

from swarmnode.codec.body import MAX_ADAPTER_CHARS, MAX_POSITIONS, MAX_ROWS, MAX_TOKEN_ID
from swarmnode.codec.sampling import Grammar
from swarmnode.codec.tensors import check_compression
from swarmnode.errors import ContextTooLong, ProtocolError, UsageError
from swarmnode.serving.client.generation import GenerateOptions
from swarmnode.swarm.records.manifest import SERVING_CODECS

MAX_TOKEN_CHARS = 128  # the longest tokens are rows of so many spaces


@dataclass(frozen=True)
class ModelLimits:
    """`vocabulary`: how many token ids it knows. `positions`: how many a sequence may have. None: no limit is known. `codecs`: as
    what its states may travel. `adapters`: the names of those that it has."""

    vocabulary: int | None = None
    positions: int | None = None
    codecs: tuple[int, ...] = SERVING_CODECS
    adapters: tuple[str, ...] = ()

    def ids(self, prompt: Iterable[object]) -> list[int]:
        """The prompt's token ids. Raises UsageError where there is none, or one that the model does not know."""
        ids = [_whole(token) for token in prompt]
        if not ids:
            raise UsageError("the prompt has no tokens")
        self.check_ids(min(ids), max(ids))
        return ids

    def check_ids(self, lowest: int, highest: int) -> None:
        """Raises UsageError where a token id between these two is none of the model's."""
        if lowest < 0:
            raise UsageError(f"token id {lowest} is negative: token ids count from 0")
        if self.vocabulary is not None and highest >= self.vocabulary:
            raise UsageError(f"token id {highest} is not in the model's vocabulary of {self.vocabulary}")
        if highest > MAX_TOKEN_ID:
            raise UsageError(f"token id {highest} is not in any model's vocabulary")

    def check_text(self, chars: int) -> None:
        """Raise ContextTooLong where a prompt of so many characters is too long however it is cut into tokens, which would take
        seconds."""
        if self.positions is not None and chars > self.positions * MAX_TOKEN_CHARS:
            raise ContextTooLong(
                f"the prompt has {chars:,} characters, the model has {self.positions:,} positions: shorten it"
            )

    def check_generation(self, prompt_length: int, new_tokens: int) -> None:
        """Raises UsageError where a prompt and so many new tokens do not fit; the last new one takes no position."""
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
        """How many fit behind a prompt; the last one takes no position. None fit where it is below 1."""
        return self._bound - prompt_length + 1

    async def check_options(self, options: GenerateOptions) -> None:
        """Raises UsageError where a bias is for a token that the model does not have, the grammar is none, the swarm does not allow
        to compress so, or has no such adapter."""
        check_compression(options.compress, self.codecs)
        self.check_adapter(options.adapter)
        if options.logit_bias:
            self.check_ids(min(options.logit_bias), max(options.logit_bias))
        if options.grammar is not None:
            await asyncio.to_thread(_check_grammar, options.grammar)

    def check_adapter(self, name: str, *, hold_ends: bool = False) -> None:
        """Raises UsageError where the swarm has no adapter of this name, or its user wants to `hold_ends`, of which nobody but the
        peers knows what it changes; "" is the model alone."""
        if name and hold_ends:
            raise UsageError("hold_ends and an adapter do not go together: what it changes of the ends is not here")
        if name and name not in self.adapters:
            known = f"it has {', '.join(self.adapters)}" if self.adapters else "it has none"
            raise UsageError(f"the swarm has no adapter {name[:MAX_ADAPTER_CHARS]!r}: {known}")

    def check_session(self, rows: int, length: int) -> None:
        """Raises UsageError where no session can have so many rows and positions."""
        if not 1 <= rows <= MAX_ROWS:
            raise UsageError(
                f"{rows} sequences together are not possible: between 1 and {MAX_ROWS} are (batch x beams)"
            )
        if not 1 <= length <= self._bound:
            raise UsageError(
                f"{length} positions were asked for, the model has {self._bound}: shorten prompt or max_new_tokens"
            )

    def room(self, length: int) -> int:
        """So many positions, and one to spare where the model has it."""
        return length + 1 if length < self._bound else length

    @property
    def _bound(self) -> int:
        return MAX_POSITIONS if self.positions is None else min(self.positions, MAX_POSITIONS)


def _check_grammar(grammar: Grammar) -> None:
    """Imports what only few texts need."""
    from swarmnode.compute.serving.grammar import check_grammar

    try:
        check_grammar(grammar)
    except ProtocolError as error:
        raise UsageError(str(error)) from error


def _whole(token: object) -> int:
    try:
        return operator.index(token)  # type: ignore[arg-type]  # what it does not take is what is looked for
    except TypeError:
        raise UsageError(f"a prompt is a text, or token ids: {token!r} is neither") from None
