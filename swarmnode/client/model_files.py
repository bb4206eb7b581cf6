"""The model's small files as a client has them: its tokenizer, and what its config says. They are fetched and read once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.client.kept_tokenizer import TokenizerCache
from swarmnode.client.tokenizer import ByteTokenizer, Tokenizer, stop_ids, vocabulary_size
from swarmnode.errors import NoRoute
from swarmnode.roles.host import Host
from swarmnode.roles.serving.client.limits import ModelLimits
from swarmnode.swarm.records.manifest import TRAIN, Manifest
from swarmnode.swarm.storage.content import has_tokenizer

if TYPE_CHECKING:
    from swarmnode.roles.fetching.weights import Weights


class ModelFiles:
    """Of the swarm that `host` has joined and whose manifest it has; `patience_s` is asked how long peers have to give them."""

    def __init__(self, host: Host, patience_s: Callable[[], float]) -> None:
        self._host = host
        self._patience_s = patience_s
        self._weights: Weights | None = None
        self._folder: Path | None = None
        self._tokenizer: Tokenizer | ByteTokenizer | None = None
        self._limits: ModelLimits | None = None
        self._stop_ids: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return f"<ModelFiles in {self._folder}>" if self._folder else "<ModelFiles, not fetched yet>"

    async def close(self) -> None:
        """Give up access to the weights."""
        if self._weights is not None:
            await self._weights.close()

    async def weights(self) -> Weights:
        """Access to the checkpoint, held until `close`."""
        weights_class = await asyncio.to_thread(_import_weights)
        if self._weights is None:
            self._weights = weights_class(self._host)
        return self._weights

    async def tokenizer(self) -> Tokenizer | ByteTokenizer | None:
        """The checkpoint's own; a swarm that trains without one does so on bytes."""
        if self._tokenizer is None and has_tokenizer(file.name for file in self._manifest.files):
            folder, cache = await self.folder(), TokenizerCache(self._host.config.home)
            self._tokenizer = await asyncio.to_thread(cache.tokenizer, self._host.swarm.id, folder)
        elif self._tokenizer is None and self._manifest.mode == TRAIN:
            self._tokenizer = ByteTokenizer()
        return self._tokenizer

    async def limits(self) -> ModelLimits:
        """What the model can be asked for."""
        if self._limits is None:
            manifest, vocabulary = self._manifest, vocabulary_size(await self.folder())
            positions, adapters = manifest.model.positions or None, manifest.adapter_names
            self._limits = ModelLimits(vocabulary, positions, manifest.codecs, adapters)
        return self._limits

    async def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        if self._stop_ids is None:
            self._stop_ids = stop_ids(await self.folder())
        return self._stop_ids

    @property
    def _manifest(self) -> Manifest:
        assert self._host.swarm.manifest is not None
        return self._host.swarm.manifest

    async def folder(self) -> Path:
        """The folder with config and tokenizer. Raises NoRoute where nobody gives them in time."""
        if self._folder is None:
            weights, patience_s = await self.weights(), self._patience_s()
            try:
                self._folder = await asyncio.wait_for(weights.small_files(), patience_s)
            except asyncio.TimeoutError:
                raise NoRoute(
                    f"no peer gave the model's config and tokenizer within {patience_s:.0f} s: nobody who holds the model is here"
                ) from None
        return self._folder


def _import_weights() -> type[Weights]:
    from swarmnode.roles.fetching.weights import Weights

    return Weights
