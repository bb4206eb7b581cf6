"""Client of a swarm that serves an encoder: it turns a text into a vector, or into the probabilities of classes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.client.tokenizer import ByteTokenizer, Tokenizer
from swarmnode.errors import CheckpointError, ContextTooLong, UsageError
from swarmnode.serving.client.limits import ModelLimits

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
    ) -> None:
        self.labels = labels
        self.size = _vector_size(module)
        self._module = module
        self._tokenizer = tokenizer
        self._limits = limits
        self._places = asyncio.Semaphore(AT_ONCE)

    def __repr__(self) -> str:
        return f"<RemoteEncoder of {self._module!r}>"

    async def ids(self, text: Text) -> list[int]:
        """Return the token ids of `text`, which may be ids already, after checking them. Raises UsageError if they cannot be used,
        ContextTooLong if there are more than the model takes."""
        if isinstance(text, str) and self._tokenizer is None:
            raise UsageError("this swarm's checkpoint has no tokenizer: send token ids instead of text")
        given = not isinstance(text, str)
        if isinstance(text, str):
            assert self._tokenizer is not None
            self._limits.check_text(len(text))
            text = await asyncio.to_thread(self._tokenizer.encode, text)
        ids, positions = self._limits.ids(text), self._limits.positions
        if given and self._tokenizer is not None and (unused := self._tokenizer.unused(ids)) is not None:
            raise UsageError(f"token id {unused} stands for nothing in the model's vocabulary, so these are {FOREIGN}")
        if positions is not None and len(ids) > positions:
            raise ContextTooLong(f"the text has {len(ids)} tokens, the model takes {positions}: shorten it")
        return ids

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


def _vector_size(module: RemoteModule) -> int:
    """Return the length of the module's vectors. Raises CheckpointError if the module does not make one vector from one row of
    tokens."""
    shapes = list(module.output_shapes(1).values())
    if len(module.graph.inputs) != 1 or [len(shape) for shape in shapes] != [1]:
        raise CheckpointError(
            "the swarm's graph does not make one vector from a row of tokens, as its manifest says: ask the swarm's host"
        )
    return shapes[0][0]


def labels_of(folder: Path) -> list[str]:
    """Return the names of a classifier's classes in their order, from the config; empty if it has none."""
    try:
        names = json.loads((folder / "config.json").read_bytes()).get("id2label")
        return [str(names[str(number)]) for number in range(len(names))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
