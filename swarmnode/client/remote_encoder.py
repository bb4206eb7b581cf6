"""Client of a swarm that serves an encoder: it turns a text into a vector, or into the probabilities of classes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.client.tokenizer import ByteTokenizer, Tokenizer
from swarmnode.errors import CheckpointError, ContextTooLong, UsageError
from swarmnode.files import parse_json
from swarmnode.serving.client.limits import MAX_TOKEN_CHARS, ModelLimits

if TYPE_CHECKING:
    import numpy as np

    from swarmnode.graph_serving.remote_module import RemoteModule

FOREIGN = "another tokenizer's ids: send texts (LangChain does with check_embedding_ctx_length=False)"
AT_ONCE = 8  # passes of one request that run at once

Text = str | Sequence[int]
"""Text, or its token ids"""


class RemoteEncoder:
    """Encoder that a swarm serves. `labels` are the names of a classifier's classes. Raises CheckpointError if the module does not
    make one vector from one row of tokens."""

    def __init__(
        self,
        module: RemoteModule,
        tokenizer: Tokenizer | ByteTokenizer | None,
        limits: ModelLimits,
        labels: Sequence[str],
        *,
        has_segments: bool = False,
    ) -> None:
        """`has_segments`: whether the model tells a text's parts apart by segment ids, which a swarm's graph does not take."""
        self.labels = labels
        self._has_segments = has_segments
        shapes = list(module.output_shapes(1).values())
        if len(module.graph.inputs) != 1 or [len(shape) for shape in shapes] != [1]:
            raise CheckpointError(
                "the swarm's graph does not make one vector from a row of tokens, as its manifest says: ask the swarm's host"
            )
        self.size = shapes[0][0]
        self._module = module
        self._tokenizer = tokenizer
        self._limits = limits
        self._places = asyncio.Semaphore(AT_ONCE)

    async def ids(self, text: Text, *, most_tokens: int | None = None) -> list[int]:
        """Return the checked token ids of a text.

        `most_tokens` cuts a longer text, but keeps the special tokens at its end; -1 is the model's limit, None cuts nothing.
        Raises UsageError for impossible ids, and ContextTooLong for more tokens than the model takes.
        """
        given = not isinstance(text, str)
        if isinstance(text, str):
            tokenizer = self._known_tokenizer()
            if most_tokens is None:
                self._limits.check_text(len(text))
            elif self._limits.positions is not None:  # all that can count; the rest of a huge text would take seconds
                text = text[: self._limits.positions * MAX_TOKEN_CHARS]
            text = await asyncio.to_thread(tokenizer.encode, text)
        if most_tokens is not None:
            text = await self._shortened(text, most_tokens)
        ids = self._limits.ids(text)
        if given and self._tokenizer is not None and (unused := self._tokenizer.unused(ids)) is not None:
            raise UsageError(
                f"token id {unused} stands for nothing in the model's "
                f"vocabulary, so these are {FOREIGN}; use the model's tokenizer"
            )
        return self._checked(ids)

    async def pair_ids(self, first: str, second: str) -> list[int]:
        """Return the token ids of two texts in one row, as cross-encoders take them; `second` is cut to the model's length.

        Raises UsageError if the model needs segment ids, and ContextTooLong if `first` alone is too long.
        """
        tokenizer, positions = self._known_tokenizer(), self._limits.positions
        if isinstance(tokenizer, ByteTokenizer):
            raise UsageError(
                "this swarm's model reads bytes: it cannot rank documents; choose a swarm of a cross-encoder"
            )
        ids, marked = await asyncio.to_thread(tokenizer.encode_pair, first, second, positions)
        if marked and self._has_segments:
            raise UsageError(
                "this cross-encoder marks the document by segment ids, which "
                "a swarm does not take; choose a model without segment ids"
            )
        return self._checked(self._limits.ids(ids))

    def _known_tokenizer(self) -> Tokenizer | ByteTokenizer:
        if self._tokenizer is None:
            raise UsageError("this swarm's checkpoint has no tokenizer: send token ids instead of text")
        return self._tokenizer

    def _checked(self, ids: list[int]) -> list[int]:
        positions = self._limits.positions
        if positions is not None and len(ids) > positions:
            raise ContextTooLong(f"the text has {len(ids)} tokens, the model takes {positions}: shorten it")
        return ids

    async def _shortened(self, ids: Sequence[int], most_tokens: int) -> Sequence[int]:
        """Return at most `most_tokens` ids (-1: the model's limit), with the special tokens at the end. Raises UsageError if no
        other token has room beside these."""
        positions = self._limits.positions
        limit = positions if most_tokens < 0 else min(most_tokens, positions or most_tokens)
        if limit is None or len(ids) <= limit:
            return ids
        specials = [] if self._tokenizer is None else await asyncio.to_thread(self._tokenizer.encode, "")
        tail = next((size for size in range(len(specials), 0, -1) if list(ids[-size:]) == list(specials[-size:])), 0)
        if tail >= limit:
            raise UsageError(
                f"a text of {limit} tokens has no room beside the model's special tokens; allow more tokens"
            )
        return [*ids[: limit - tail], *ids[len(ids) - tail :]]

    async def vectors(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Compute the vector of each row of ids, as float32. Raises NoRoute, Busy, UsageError."""
        passes = [asyncio.ensure_future(self._vector(row)) for row in rows]
        try:
            return list(await asyncio.gather(*passes))
        finally:
            for one in passes:
                one.cancel()

    async def _vector(self, ids: Sequence[int]) -> np.ndarray:
        async with self._places:
            (item,) = self._module.graph.inputs
            outputs = await self._module.infer({item.argument: list(ids)})
        (vector,) = outputs.values()
        return vector


def labels_of(folder: Path) -> list[str]:
    """Return the names of a classifier's classes in their order, from the config; empty if it has none."""
    try:
        names = parse_json((folder / "config.json").read_bytes()).get("id2label")
        return [str(names[str(number)]) for number in range(len(names))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def has_segments(folder: Path) -> bool:
    """Return whether the config of an encoder has several segments (`type_vocab_size`), as BERT's; False without a config."""
    try:
        return int(parse_json((folder / "config.json").read_bytes()).get("type_vocab_size") or 0) > 1
    except (OSError, ValueError, TypeError, AttributeError):
        return False
