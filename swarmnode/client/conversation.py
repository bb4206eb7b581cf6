"""A conversation with the model of a swarm: each turn is asked with all that was said before it.

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

KEPT_FOR = "conversations"  # of this client


class Conversation:
    """One at a time: an answer that was not listened to the end counts as far as it was heard."""

    def __init__(self, client: SwarmClient, options: GenerateOptions | None = None, *, system: str = "") -> None:
        """`system` says what the model shall be, to models that know such a role."""
        self._client = client
        self._options = options
        self._begin = (Turn("system", system),) if system else ()
        self.turns = list(self._begin)

    def __repr__(self) -> str:
        return f"<Conversation of {len(self.turns)} turns>"

    def forget(self) -> None:
        """Begin anew."""
        self.turns = list(self._begin)

    async def ask(self, text: str) -> AsyncGenerator[GeneratedText, None]:
        """The answer, piece by piece. Raises what `SwarmClient.stream_chat` does; then the question was not asked."""
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
