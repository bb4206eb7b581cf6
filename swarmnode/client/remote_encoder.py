"""Client of a swarm's model: its files, its module that takes arrays, and its encoder, which turns a text into a vector, or into
the probabilities of classes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.client.adapters import ClientAdapters
from swarmnode.client.model_files import ModelFiles, loaded
from swarmnode.client.observer import SwarmObserver
from swarmnode.client.tokenizer import ByteTokenizer, Tokenizer
from swarmnode.config import ClientConfig
from swarmnode.credit.receipts import Claims, ReceiptIssuer
from swarmnode.errors import CheckpointError, ContextTooLong, NoRoute, PeerRefused, UsageError
from swarmnode.files import parse_json
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import cancel_and_wait
from swarmnode.peer.host import Host
from swarmnode.plan.view import Span
from swarmnode.serving.client.limits import MAX_TOKEN_CHARS, ModelLimits
from swarmnode.serving.client.router import DirectoryRouter
from swarmnode.swarm.records.announcement import Trust
from swarmnode.swarm.records.manifest import CLASSIFY, EMBED, GRAPH, SERVE, TRAIN

if TYPE_CHECKING:
    import numpy as np

    from swarmnode.compute.model.checkpoint import Checkpoint
    from swarmnode.graph_serving.remote_module import RemoteModule

FOREIGN = "another tokenizer's ids: send texts (LangChain does with check_embedding_ctx_length=False)"
AT_ONCE = 8  # passes of one request that run at once

AT_ONCE_S = 1.0  # for an adapter's chat template where only its end of an answer is needed
MAX_SHOWN = 32  # first hops that learn the credit of this machine's nodes

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
        is_ids = not isinstance(text, str)
        if isinstance(text, str):
            tokenizer = self._require_tokenizer()
            if most_tokens is None:
                self._limits.check_text(len(text))
            elif self._limits.positions is not None:  # all that can count; the rest of a huge text would take seconds
                text = text[: self._limits.positions * MAX_TOKEN_CHARS]
            text = await asyncio.to_thread(tokenizer.encode, text)
        if most_tokens is not None:
            text = await self._shortened(text, most_tokens)
        ids = self._limits.ids(text)
        if is_ids and self._tokenizer is not None and (unused := self._tokenizer.unused(ids)) is not None:
            raise UsageError(
                f"token id {unused} stands for nothing in the model's "
                f"vocabulary, so these are {FOREIGN}; use the model's tokenizer"
            )
        return self._checked(ids)

    async def pair_ids(self, first: str, second: str) -> list[int]:
        """Return the token ids of two texts in one row, as cross-encoders take them; `second` is cut to the model's length.

        Raises UsageError if the model needs segment ids, and ContextTooLong if `first` alone is too long.
        """
        tokenizer, positions = self._require_tokenizer(), self._limits.positions
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

    def _require_tokenizer(self) -> Tokenizer | ByteTokenizer:
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


class ModelClient(SwarmObserver):
    """Client with the small files of the swarm's model, and with its module if the swarm serves one."""

    def __init__(self, host: Host, config: ClientConfig, trust: Trust, *, most_positions: int | None = None) -> None:
        super().__init__(host)
        self.config = config
        self.trust = trust
        self._files = ModelFiles(host, lambda: self.config.patience_s, most_positions=most_positions)
        self._module: asyncio.Task[RemoteModule] | None = None
        self.adapters = ClientAdapters(host, self._files)
        self._receipts = ReceiptIssuer(host)
        self._claims = Claims(host)

    async def close(self) -> None:
        """Leave the swarm."""
        if self._module is not None:
            await cancel_and_wait(self._module)
            if not self._module.cancelled() and self._module.exception() is None:
                await self._module.result().close()
        await self.adapters.close()
        await self._files.close()
        await super().close()

    def _router(self, span: Span, *, ring: bool) -> DirectoryRouter:
        announced = self._host.directory.peers().values()
        first_hops = (peer.peer for peer in announced if peer.holds(span.start))
        self._claims.show(itertools.islice(first_hops, MAX_SHOWN))
        return DirectoryRouter(self._host, self.units, span, ring=ring, trust=self.trust)

    async def infer(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Compute the outputs of the swarm's module.

        Args:
            inputs: Arrays by name, with samples along the first dimension if the module was exported so.

        Returns:
            Arrays by name.

        Raises:
            UsageError: The swarm serves no module, or the inputs do not fit it.
            NoRoute: The peers do not cover the module within the client's patience.
            Busy: The peers have no room within the client's patience.
        """
        return await (await self.remote_module()).infer(inputs)

    async def remote_module(self) -> RemoteModule:
        """Return the swarm's module, whose passes the swarm computes. Raises UsageError if the swarm serves none."""
        self._host.supervisor.check()
        if self.manifest.kind != GRAPH or self.manifest.mode != SERVE:
            does = "trains its model" if self.manifest.mode == TRAIN else "serves a language model"
            raise UsageError(
                f"the swarm {self.manifest.name} {does}: it has no module that takes arrays; choose another swarm"
            )
        if self._module is None or (self._module.done() and self._module.exception() is not None):
            self._module = asyncio.ensure_future(self._open_module())
        return await asyncio.shield(self._module)

    async def embed(self, texts: Sequence[str | Sequence[int]], *, truncate: bool = True) -> list[np.ndarray]:
        """Compute the vectors of texts.

        Args:
            texts: Texts, or rows of token ids.
            truncate: Cut texts that are longer than the model takes, as sentence-transformers does; else they are refused.

        Returns:
            One float32 vector per text.

        Raises:
            UsageError: The swarm's model does not embed texts, or a text cannot be encoded.
            ContextTooLong: A text is longer than the model takes, and not to be cut.
            NoRoute: The peers do not cover the model within the client's patience.
            Busy: The peers have no room within the client's patience.
        """
        encoder, most_tokens = await self.encoder(EMBED), -1 if truncate else None
        return await encoder.vectors([await encoder.ids(text, most_tokens=most_tokens) for text in texts])

    async def classify(self, texts: Sequence[str | Sequence[int]]) -> list[dict[str, float]]:
        """Classify texts.

        Args:
            texts: Texts, or rows of token ids.

        Returns:
            For each text, the probabilities of the classes by their labels.

        Raises:
            UsageError: The swarm serves no classifier, or a text cannot be encoded.
            ContextTooLong: A text is longer than the model takes.
            NoRoute: The peers do not cover the model within the client's patience.
            Busy: The peers have no room within the client's patience.
        """
        encoder = await self.encoder(CLASSIFY)
        vectors = await encoder.vectors([await encoder.ids(text) for text in texts])
        return [dict(zip(encoder.labels, map(float, vector), strict=True)) for vector in vectors]

    async def encoder(self, task: str) -> RemoteEncoder:
        """Return the swarm's encoder for `task`: `embed` or `classify`. Raises UsageError if the swarm's model has another task."""
        if self.manifest.task != task:
            raise UsageError(
                f"the model of {self.manifest.name} {self.manifest.purpose}: it cannot {task}; choose another swarm"
            )
        module, tokenizer, limits = await self.remote_module(), await self.tokenizer(), await self.limits()
        if task != CLASSIFY:
            return RemoteEncoder(module, tokenizer, limits, [])
        folder = await self._files.folder()
        return RemoteEncoder(module, tokenizer, limits, labels_of(folder), has_segments=has_segments(folder))

    async def _open_module(self) -> RemoteModule:
        await loaded("swarmnode.graph_serving.remote_module")
        from swarmnode.compute.graph.boundary import Layout
        from swarmnode.compute.graph.serialise import read_graph
        from swarmnode.graph_serving.remote_module import RemoteModule

        folder = await self._files.folder()
        layout = await asyncio.to_thread(lambda: Layout(read_graph(folder)))

        def router(span: Span) -> DirectoryRouter:
            return self._router(span, ring=False)

        def served(peer: PeerId, work: bytes, unit_samples: int) -> None:
            self._receipts.record(peer, work, served=unit_samples)

        config = self.config
        return RemoteModule(
            self._host, layout, router, patience_s=config.patience_s, on_served=served, audit_share=config.audit_share
        )

    async def tokenizer(self, adapter: str = "") -> Tokenizer | ByteTokenizer | None:
        """Return the checkpoint's tokenizer; for a swarm that trains without one, a ByteTokenizer; else None. With an `adapter`
        that has a chat template of its own, chats by this tokenizer use it. Raises NoRoute if no peer provides the files,
        CheckpointError if the tokenizer cannot be used, UsageError if there is no such adapter."""
        return await self.adapters.tokenizer(adapter)

    async def outline(self) -> Checkpoint | None:
        """Return the model's checkpoint with config, index and headers, without weights; None if no peer provides them in time."""
        weights = await self._files.weights()
        try:
            return await asyncio.wait_for(weights.outline(), self._files.patience_s())
        except (TimeoutError, PeerRefused):
            return None

    async def limits(self) -> ModelLimits:
        """Return the bounds on requests to the model. Raises NoRoute if no peer provides the config."""
        return await self._files.limits()

    @property
    def cached_positions(self) -> int | None:
        """Number of positions that a text may have, as far as known; None if there is no limit or it is not known yet."""
        return self._files.cached_positions

    async def stop_ids(self, adapter: str = "") -> tuple[int, ...]:
        """Return the ids of the tokens that end a text; empty if none are known. With an `adapter` that has a chat template of its
        own, they end its answers; if no peer gives that template at once, they are the model's own. Raises NoRoute if no peer
        provides the model's files, UsageError if there is no such adapter."""
        tokenizer = None
        with contextlib.suppress(NoRoute, CheckpointError):
            tokenizer = await self.adapters.tokenizer(adapter, patience_s=AT_ONCE_S) if adapter else None
        return await self._files.stop_ids(tokenizer)

    async def generation_defaults(self) -> dict[str, float | int]:
        """Return the defaults for sampling over HTTP, as fields of GenerateOptions: the checkpoint's, or temperature 0.8, top-k 40
        and top-p 0.95 if it has none. They apply only if the caller passes them on."""
        return await self._files.generation_defaults()

    @property
    def cached_defaults(self) -> dict[str, float | int] | None:
        """Result of `generation_defaults`, as far as known without asking a peer; None if it is not known yet."""
        return self._files.cached_defaults
