"""Weights that are put into another order once several sessions are there, while these go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.compute.model import linear
from swarmnode.compute.model.linear import BlockedLinear
from swarmnode.compute.model.span import ModelSpan
from swarmnode.serving import serving_stage, span_part
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.test_faults import two_by_two
from tests.tiny import PROMPT, TinyModel

TOKENS, SESSIONS, ROUNDS = 12, 6, 20


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[ModelSpan]:
    """Those that are loaded: on any CPU, blocks are the faster."""
    loaded: list[ModelSpan] = []
    load_span = serving_stage.load_span

    def noted(*args: object, **more: object) -> ModelSpan:
        loaded.append(load_span(*args, **more))  # type: ignore[arg-type]
        return loaded[-1]

    monkeypatch.setattr(serving_stage, "load_span", noted)
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(
        linear, "_forms_to_pack", lambda weights, choices: {one.shape: BlockedLinear for one in weights}
    )
    monkeypatch.setattr(linear, "_forms", {})
    monkeypatch.setattr(span_part, "COMPANY_PASSES", 4)
    return loaded


def waiting(spans: list[ModelSpan]) -> int:
    """Layers that are still to be packed."""
    return sum(len(span.packings.in_company) for span in spans)


@in_virtual_time
async def test_weights_are_put_in_blocks_once_sessions_share_passes_and_texts_stay(
    founded: Founded, tiny: TinyModel, tmp_path: Path, spans: list[ModelSpan]
) -> None:
    async def text(client: SwarmClient) -> None:
        assert (await client.generate(PROMPT, max_new_tokens=TOKENS)).ids == tiny.alone(PROMPT, TOKENS)

    async with two_by_two(founded, tmp_path) as (_, _, client):
        layers = waiting(spans)
        await text(client)
        assert waiting(spans) == layers > 0
        for _ in range(ROUNDS):
            await asyncio.gather(*(text(client) for _ in range(SESSIONS)))
            if not waiting(spans):
                break
        assert not waiting(spans)
        assert any(isinstance(module, BlockedLinear) for span in spans for module in span.model.modules())
        await text(client)
