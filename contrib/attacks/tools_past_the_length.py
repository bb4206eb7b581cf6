"""A client hides megabytes in tools, calls, results, roles and variables of a chat, which the gateway tokenizes for seconds."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from attack import Outcome, main

from tests.gateway.conftest import found_on, serving
from tests.gateway.speaking import save_speaking_llama
from tests.gateway.test_chat_prompt import SHOWS_ALL, long_requests, record_lengths

VIRTUAL, FAST = True, True
POSITIONS = 64


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        save_speaking_llama(path / "model", chat_template=SHOWS_ALL, max_position_embeddings=POSITIONS)
        async with serving(found_on(path / "model", path / "founded"), path) as served:
            with pytest.MonkeyPatch.context() as patch:
                lengths = record_lengths(patch.setattr)
                for place, body in long_requests():
                    await served.http.post(place, json=body)
    most = max(lengths)
    return Outcome(most <= POSITIONS * 128, f"{most:,} characters were tokenized for a model of {POSITIONS} positions")


main(__name__, attack, virtual=VIRTUAL)
