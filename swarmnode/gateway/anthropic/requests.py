"""What Anthropic's clients ask for."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from swarmnode.gateway.generation.sampling_fields import SamplingFields, checked_stops
from swarmnode.gateway.openai.conversation import MAX_MESSAGES, ContentPart, Message, text_of


class MessagesRequest(SamplingFields):
    """POST /v1/messages"""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[ContentPart] | None = None
    stop_sequences: list[str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return checked_stops(self.stop_sequences or ())

    def conversation(self) -> list[dict[str, Any]]:
        """As chat templates expect it."""
        begin = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        return [*begin, *(message.as_template_takes_it() for message in self.messages)]
