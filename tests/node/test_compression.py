"""States that are compressed where a link is slow: prompts come sooner, and what breaks changes no text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.codec.tensors import Codec
from swarmnode.errors import PeerRefused, UsageError
from swarmnode.net.memory.medium import Path as NetworkPath
from swarmnode.serving.client.generation import Generation
from swarmnode.swarm.records.manifest import SERVE
from tests.llama import save_llama
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.test_faults import TOKENS, two_by_two
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm
from tests.tiny import PROMPT, TinyModel

MEASURED_S = 150.0  # until nodes have tested the bandwidth between them
SLOW = NetworkPath(latency_s=0.02, bytes_per_s=20e6 / 8)
LONG_PROMPT = [(7 * number) % 500 for number in range(2048)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Founded:
    """States of 2 KiB: a prompt of 2,048 tokens is 4 MiB."""
    folder = tmp_path_factory.mktemp("wide")
    save_llama(folder / "model", layers=2, hidden_size=512)
    return Founded.on(folder / "model", folder)


@contextlib.asynccontextmanager
async def behind_a_slow_link(founded: Founded, folder: Path) -> AsyncIterator[tuple[VirtualMember, SwarmClient]]:
    """The first hop and a client; the way to the second hop is slow, and was measured."""
    async with VirtualSwarm(folder) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        first, second = swarm.node("first", "0:2"), swarm.node("second", "2:4")
        for member in (first, second):
            await member.wait_for("ready")
        swarm.world.set_path(first.peer, second.peer, SLOW)
        async with swarm.client() as client:
            await asyncio.sleep(MEASURED_S)
            yield first, client


def sent(member: VirtualMember) -> dict[str, float]:
    """Bytes that a node has sent on so far, by codec."""
    stage = member.node._stage
    assert stage is not None
    counts = stage.server._replicas.meter._encoded_bytes  # type: ignore[union-attr]
    return {codec.name: count for (codec, _), count in counts.items()}


@in_virtual_time
async def test_a_long_prompt_over_a_slow_link_comes_three_times_sooner(wide: Founded, tmp_path: Path) -> None:
    async with behind_a_slow_link(wide, tmp_path) as (first, client):
        raw = await client.generate(LONG_PROMPT, max_new_tokens=4, compress="none")
        assert set(sent(first)) == {"NONE"}
        told = await client.generate(LONG_PROMPT, max_new_tokens=4)
        assert raw.first_token_s >= 3 * told.first_token_s, (raw.first_token_s, told.first_token_s)
        assert {"INT8", "INT4"} & set(sent(first))
        int8 = await client.generate(LONG_PROMPT, max_new_tokens=4, compress="int8")
        assert raw.first_token_s >= 3 * int8.first_token_s, (raw.first_token_s, int8.first_token_s)


@in_virtual_time
async def test_nothing_is_compressed_where_links_are_fast(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    async with two_by_two(founded, tmp_path) as (swarm, _, client):
        for member in swarm.members.values():
            assert member.node._host is not None
            for other in swarm.members.values():
                member.node._host.paths.link_statistics.sent(other.peer, 1e9)
        result = await client.generate(PROMPT, max_new_tokens=TOKENS)
        assert result.ids == tiny.alone(PROMPT, TOKENS)
        assert set(sent(swarm.member(result.route[0].peer))) == {"NONE"}


async def generate_on_slow_links(founded: Founded, folder: Path, *, struck: bool) -> Generation:
    """The first hop believes that it sends 160 kbit/s; where it and the last one are `struck`, others take over that can send as
    fast as they like."""
    async with VirtualSwarm(folder) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        slow, *others = [swarm.node(name, span) for name, span in (("a1", "0:3"), ("b1", "3:6"), ("b2", "3:6"))]
        for member in (slow, *others):
            await member.wait_for("ready")
        assert slow.node._host is not None
        for member in others:
            slow.node._host.paths.link_statistics.sent(member.peer, 160e3)
        async with swarm.client() as client:
            stream = await client.stream(PROMPT, max_new_tokens=TOKENS)
            async for _ in stream:
                if struck and len(stream.result.ids) == 17:
                    assert set(sent(slow)) == {"INT4", "INT8"}, "a prompt, and steps"
                    await swarm.node("a2", "0:3").wait_for("ready")
                    for hop in stream.result.route:
                        await swarm.member(hop.peer).kill()
            return stream.result


@in_virtual_time
async def test_killed_nodes_do_not_change_a_compressed_text(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    """Whoever takes over sends in the codecs that were chosen before, though its own links are fast."""
    folders = [tmp_path / "whole", tmp_path / "struck"]
    for folder in folders:
        folder.mkdir()
    whole, struck = [await generate_on_slow_links(founded, one, struck=one is folders[1]) for one in folders]
    assert struck.reroutes >= 1 and struck.ids == whole.ids
    assert whole.ids != tiny.alone(PROMPT, TOKENS), "rounding shows in this text, so another rounding would"


@in_virtual_time
async def test_what_the_manifest_does_not_allow_is_refused_on_both_sides(tiny: TinyModel, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm, contextlib.AsyncExitStack() as ends:
        patch = ends.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("swarmnode.founding.swarm_creation.SERVING_CODECS", (Codec.NONE, Codec.BF16))
        swarm.create(tiny.folder, mode=SERVE)
        await swarm.bootstrap()
        for span in ("0:3", "3:6"):
            await swarm.node(f"n{span[0]}", span).wait_for("ready")
        async with swarm.client() as client:
            with pytest.raises(UsageError, match="does not compress as int8: choose auto, none, bf16"):
                await client.generate(PROMPT, max_new_tokens=4, compress="int8")
            with pytest.raises(UsageError, match="compress must be one of"):
                await client.generate(PROMPT, max_new_tokens=4, compress="zip")
            patch.setattr("swarmnode.serving.client.limits.check_compression", lambda *_: None)
            with pytest.raises(PeerRefused, match="positions, codec or adapter"):
                await client.generate(PROMPT, max_new_tokens=4, compress="int8")
