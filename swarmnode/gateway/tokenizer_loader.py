"""A model's tokenizer, loaded once for all requests: importing transformers and having it read a checkpoint takes seconds."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.client.tokenizer import ByteTokenizer, Tokenizer
from swarmnode.errors import CheckpointError, NoRoute, SwarmnodeError
from swarmnode.gateway.http.api_error import RETRY_S, ApiError
from swarmnode.net.tasks import Tasks

log = logging.getLogger(__name__)
GREETING = [{"role": "user", "content": "hi"}]


class TokenizerLoader:
    """That of the swarm of `client`. What loads it is one of `tasks`, however many wait for it."""

    def __init__(self, client: SwarmClient, tasks: Tasks) -> None:
        self._client = client
        self._tasks = tasks
        self._loading: asyncio.Task[Tokenizer | ByteTokenizer | None] | None = None

    def __repr__(self) -> str:
        return f"<TokenizerLoader of {self._client!r}{'' if self.is_done else ', loading'}>"

    @property
    def is_done(self) -> bool:
        """Whether it is there, or is known to be none."""
        return self._loading is not None and self._loading.done()

    async def tokenizer(self) -> Tokenizer | ByteTokenizer | None:
        """The checkpoint's own, as SwarmClient has it. Raises NoRoute where nobody gives its files within the client's patience,
        ApiError where it is not loaded by then, CheckpointError where it cannot be used."""
        if self._loading is not None and self._loading.done():
            return self._loading.result()
        loop, patience_s = asyncio.get_running_loop(), self._client.config.patience_s
        until_s = loop.time() + patience_s
        loading = await self._begun()
        try:
            return await asyncio.wait_for(asyncio.shield(loading), until_s - loop.time())
        except asyncio.TimeoutError:
            sentence = f"the model's tokenizer is still being loaded after {patience_s:g} s: ask again"
            raise ApiError(503, sentence, kind="server_error", code="loading", retry_s=RETRY_S) from None

    async def load(self) -> None:
        """Before anybody asks, as soon as its files are here."""
        while not self.is_done:
            try:
                await asyncio.shield(await self._begun())
            except NoRoute:
                await self._client.changed()
            except SwarmnodeError as error:
                log.warning("%s", error)
                return

    async def _begun(self) -> asyncio.Task[Tokenizer | ByteTokenizer | None]:
        """What loads it, once the swarm has given the model's small files. Raises NoRoute."""
        await self._client.limits()
        if self._loading is None:
            self._loading = self._tasks.spawn(self._load(), "tokenizer", awaited=True)
        return self._loading

    async def _load(self) -> Tokenizer | ByteTokenizer | None:
        try:
            tokenizer = await self._client.tokenizer()
            if isinstance(tokenizer, Tokenizer) and tokenizer.has_chat_template:
                await asyncio.to_thread(_converse, tokenizer)
        except BaseException:
            self._loading = None  # who asks next tries again
            raise
        return tokenizer


def _converse(tokenizer: Tokenizer) -> None:
    """A template is compiled, and what that needs imported, for the first conversation."""
    with contextlib.suppress(CheckpointError):  # it may want to be told something else than a greeting
        tokenizer.encode_messages(GREETING)
