"""A swarm whose nodes keep KV caches in 8 bits: one text through kills, room for more, and a format that others can tell apart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.config import INT8_KV, PLAIN, StageConfig
from swarmnode.errors import UsageError
from swarmnode.measuring.hardware import Hardware
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.test_kept_sessions import LONG, TWO_BY_TWO, ask, swarm_of
from tests.tiny import PROMPT, TinyModel

TOKENS = 24


@pytest.mark.parametrize("place", [0, 1], ids=["first", "last"])
@in_virtual_time
async def test_a_kill_in_company_changes_no_text(founded: Founded, tmp_path: Path, place: int) -> None:
    """Each text is the one that it is alone; a hop that takes over computes as a prompt what was decoded."""
    prompts = [[*PROMPT, at] for at in range(4)]
    async with swarm_of(founded, tmp_path, TWO_BY_TWO, kv=INT8_KV) as (swarm, client):
        alone = [(await client.generate(prompt, max_new_tokens=TOKENS)).ids for prompt in prompts]
        others = [asyncio.ensure_future(client.generate(prompt, max_new_tokens=TOKENS)) for prompt in prompts[1:]]
        stream = await client.stream(prompts[0], max_new_tokens=TOKENS)
        count = 0
        async for _ in stream:
            count += 1
            if count == TOKENS // 2:
                await swarm.member(stream.result.route[place].peer).kill()
        together = [stream.result.ids, *(result.ids for result in await asyncio.gather(*others))]
        assert together == alone
        assert stream.result.reroutes >= 1


@in_virtual_time
async def test_a_kept_text_goes_on_in_8_bits(founded: Founded, tmp_path: Path) -> None:
    """The next turn continues the kept cache, and says what it says without one."""
    async with swarm_of(founded, tmp_path, {"a": "0:6"}, kv=INT8_KV) as (_, client):
        first = await ask(client, LONG)
        turn = [*LONG, *first.ids, 7, 9, 11]
        second, fresh = await ask(client, turn), await ask(client, turn, None)
        assert (second.cached_tokens, fresh.cached_tokens) == (len(LONG) + len(first.ids) - 1, 0)
        assert second.ids == fresh.ids


@in_virtual_time
async def test_others_see_the_format_and_the_room(founded: Founded, tmp_path: Path) -> None:
    seen = {}
    for kv in (PLAIN, INT8_KV):
        async with swarm_of(founded, tmp_path / kv, {"a": "0:6"}, kv=kv, max_cache_tokens=4096) as (_, client):
            await client.generate(PROMPT, max_new_tokens=2)
            (seen[kv],) = (peer for peer in client.status()["peers"] if any(peer["span"]))
    assert [seen[kv]["number_format"] for kv in (PLAIN, INT8_KV)] == ["float32", "float32+kv8"]
    assert seen[INT8_KV]["cache_tokens_free"] == seen[PLAIN]["cache_tokens_free"] == 4096


def test_more_positions_fit_beside_the_weights(tiny: TinyModel) -> None:
    checkpoint = Checkpoint(tiny.folder)
    need = {}
    for kv in (PLAIN, INT8_KV):
        hardware = Hardware.probe(checkpoint, StageConfig(device="cpu", kv=kv))
        need[kv] = hardware.sizes.need_bytes(0, tiny.units, 1000) - hardware.sizes.need_bytes(0, tiny.units, 0)
    heads, dim = checkpoint.family.cache_shapes[0][0]
    assert need[PLAIN] / need[INT8_KV] == pytest.approx(4 * dim / (dim + 2))
    assert heads > 0


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (StageConfig(kv=INT8_KV, dtype="bfloat16"), "bfloat16+kv8"),
        (StageConfig(kv=INT8_KV, quantize="int8", dtype="float32"), "float32+kv8-int8"),
        (StageConfig(dtype="float32"), "float32"),
    ],
)
def test_the_announced_number_format(tiny: TinyModel, stage: StageConfig, expected: str) -> None:
    """Quantised weights come last, so that older peers do not take the numbers for those of a plain cache."""
    hardware = Hardware.probe(Checkpoint(tiny.folder), stage)
    assert hardware.number_format == expected
    assert hardware.dtype is getattr(torch, expected.partition("+")[0])


def test_what_is_not_possible_is_said(tiny: TinyModel) -> None:
    with pytest.raises(UsageError, match=r"--kv int4: choose plain, int8"):
        StageConfig(kv="int4").check()
    with pytest.raises(UsageError, match=r"training keeps no KV cache: leave --kv alone"):
        Hardware.probe(Checkpoint(tiny.folder), StageConfig(kv=INT8_KV), trains=True)
