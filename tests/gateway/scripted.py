"""A model that says what a test wants it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.client.text_stream import GeneratedText
from swarmnode.serving.client.generation import Generation


class Scripted:
    """A stream that says a text, three characters at a time, with a pause before each."""

    rest = ""

    def __init__(self, text: str, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s
        self.result = Generation(trace="0" * 32)
        self._pieces = [text[begin : begin + 3] for begin in range(0, len(text), 3)]

    async def __aiter__(self) -> AsyncGenerator[GeneratedText, None]:
        for piece in self._pieces:
            await asyncio.sleep(self._pause_s)
            self.result.ids.append(1)
            yield GeneratedText(1, piece)


def says(client: SwarmClient, monkeypatch: pytest.MonkeyPatch, text: str, *, pause_s: float = 0.0) -> list[list[int]]:
    """Let the swarm answer every prompt with this text. The prompts by now, as ids."""
    prompts: list[list[int]] = []

    async def stream(prompt: list[int], _options: Any, **_named: object) -> Scripted:
        prompts.append(prompt)
        return Scripted(text, pause_s)

    monkeypatch.setattr(client, "stream", stream)
    return prompts
