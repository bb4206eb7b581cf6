"""Conversation with the model of a swarm: each prompt contains all earlier turns.

conversation = Conversation(client)
async for piece in await conversation.ask("Who are you?"):
    print(piece.text, end="")
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from swarmnode.client.tokenizer import Turn
from swarmnode.serving.client.generation import GenerateOptions

if TYPE_CHECKING:
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.client.text_stream import GeneratedText, TextStream

KEPT_FOR = "conversations"  # owner of the kept caches


class Conversation:
    """Conversation with one answer at a time. If the caller stops reading an answer, the part that was read becomes the model's
    turn."""

    def __init__(self, client: SwarmClient, options: GenerateOptions | None = None, *, system: str = "") -> None:
        """`system` is a system text, for models that know that role; empty for none."""
        self._client = client
        self._options = options
        self._begin = (Turn("system", system),) if system else ()
        self.turns = list(self._begin)

    def __repr__(self) -> str:
        return f"<Conversation of {len(self.turns)} turns>"

    def forget(self) -> None:
        """Forget all messages of the conversation but the system text."""
        self.turns = list(self._begin)

    async def ask(self, text: str) -> AsyncGenerator[GeneratedText, None]:
        """Send `text` as the user's next turn and return the answer as a stream of pieces. Raises what `SwarmClient.stream_chat`
        raises; the conversation is then unchanged."""
        asked = [*self.turns, Turn("user", text)]
        stream = await self._client.stream_chat(asked, self._options, kept_for=KEPT_FOR)
        return self._listen(asked, stream)

    async def _listen(self, asked: list[Turn], stream: TextStream) -> AsyncGenerator[GeneratedText, None]:
        heard = ""
        try:
            async for piece in stream:
                heard += piece.text or ""
                yield piece
        finally:
            self.turns = [*asked, Turn("assistant", heard)]
