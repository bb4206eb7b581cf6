"""A swarm on a GGUF file whose weights stay packed says what one process says with the dequantised ones, whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.compute import expert_slots
from swarmnode.compute.capacity.capacity import UnitSizes, limit_bytes_for, unit_sizes
from swarmnode.compute.expert_slots import buffer_bytes
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.packing.ggml import library
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.config import EXACT, FAST, StageConfig
from swarmnode.counting import format_bytes
from swarmnode.errors import CheckpointError, ErrorCode, ProtocolError, UsageError
from swarmnode.founding.model_source import ModelSource, from_checkpoint
from swarmnode.founding.swarm_creation import from_folders
from swarmnode.ledger import Account
from swarmnode.lending.lending import Keep, LendingState
from swarmnode.metrics import table
from swarmnode.node.description import measured
from swarmnode.swarm.records.manifest import PACKED_FORMAT, decode_manifest, encode_manifest
from swarmnode.swarm.storage.content import PACKED_NAME
from tests.adapters import merged_checkpoint, save_llama_adapter
from tests.compute.model.llama_gguf import lose_ggml, save_llama_gguf, save_moe_gguf
from tests.llama import save_llama
from tests.net.virtual import in_virtual_time
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm, sees_ready
from tests.tiny import TinyModel

pytestmark = pytest.mark.skipif(
    library() is None, reason="the package xllamacpp is not installed, or not for this machine"
)

PROMPT, NEW, UNITS = [5, 80, 3, 61, 17, 200, 9], 12, 4
TWO_BY_TWO = {"a1": "0:2", "b1": "2:4", "a2": "0:2", "b2": "2:4"}


class Packed:
    """A packed model, and the same one dequantised to float32 in a folder of transformers."""

    def __init__(self, folder: Path, save: Any) -> None:
        self.file, self.folder = folder / "tiny.gguf", folder / "packed"
        save(self.file, form="Q4_0")
        self.source: ModelSource = from_checkpoint(str(self.file), self.folder, packs=True)
        auto: Any = AutoModelForCausalLM
        read: Any = load_gguf_checkpoint
        model = auto.from_config(Checkpoint(self.folder).config, dtype=torch.float32)
        model.load_state_dict(read(str(self.file), return_tensors=True, model_to_load=model)["tensors"])
        model.save_pretrained(folder / "plain")
        self.plain = TinyModel(folder / "plain", UNITS)


@pytest.fixture(scope="module", params=[save_llama_gguf, save_moe_gguf], ids=["llama", "experts"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return Packed(tmp_path_factory.mktemp("packed"), request.param)


@asynccontextmanager
async def swarm_of(
    packed: Packed, folder: Path, spans: dict[str, str], *, adapters: Any = None, **stage: Any
) -> AsyncIterator[tuple[VirtualSwarm, SwarmClient]]:
    """Nodes that have only the invite; the bootstrap peer gives them the packed bytes. They multiply exactly."""
    stage = {"dtype": "float32"} | stage
    async with VirtualSwarm(folder) as swarm:
        invite = swarm.create(packed.source, adapters=adapters).invite
        await swarm.bootstrap()
        for name, span in spans.items():
            swarm.node(name, span, swarm=invite, **stage)
        for member in swarm.members.values():
            await member.wait_for("ready")
        async with swarm.client() as client:
            await sees_ready(client, len(spans))
            yield swarm, client


def weights_bytes(member: VirtualMember) -> int:
    host = member.node._host
    assert host is not None
    return host.link_config.ledger.accounts()[Account.WEIGHTS]


@in_virtual_time
async def test_several_sessions_and_a_kill(packed: Packed, tmp_path: Path) -> None:
    async with swarm_of(packed, tmp_path, TWO_BY_TWO) as (swarm, client):
        prompts = [[*PROMPT, at] for at in range(6)]
        results = await asyncio.gather(*(client.generate(prompt, max_new_tokens=NEW) for prompt in prompts))
        assert [result.ids for result in results] == [packed.plain.alone(prompt, NEW) for prompt in prompts]
        for place in (0, 1):
            stream = await client.stream(PROMPT, max_new_tokens=NEW)
            count = 0
            async for _ in stream:
                count += 1
                if count == NEW // 2:
                    await swarm.member(stream.result.route[place].peer).kill()
            assert stream.result.ids == packed.plain.alone(PROMPT, NEW)
            assert stream.result.reroutes >= 1


def fast_alone(packed: Packed, prompt: list[int]) -> list[int]:
    """Return what one process without company generates with fast products, one token a pass."""
    checkpoint = Checkpoint(packed.folder)
    span = load_span(checkpoint, 0, checkpoint.units, dtype=torch.float32, products="fast")
    runner = StageRunner(span, RunnerConfig(cache_bytes=1 << 24))
    runner.open(0, rows=1, max_length=len(prompt) + NEW)
    ids, x = [], torch.tensor([prompt])
    for _ in range(NEW):
        x = runner.run([StepInput(0, x)])[0].output.argmax(dim=-1)
        ids.append(int(x))
    return ids


@in_virtual_time
async def test_fast_products_say_the_same_in_company_at_other_cuts_and_after_a_kill_and_a_hang(
    packed: Packed, tmp_path: Path
) -> None:
    spans = {"a1": "0:2", "b1": "2:4", "a2": "0:2", "b2": "2:4", "a3": "0:3", "b3": "3:4"}
    prompts = [[*PROMPT, *range(at, 2 * at)] for at in range(8)]
    alone = [fast_alone(packed, prompt) for prompt in prompts]
    async with swarm_of(packed, tmp_path, spans, products="fast") as (swarm, client):
        results = await asyncio.gather(*(client.generate(prompt, max_new_tokens=NEW) for prompt in prompts))
        assert [result.ids for result in results] == alone
        with ExitStack() as hung:
            for place, prompt in enumerate(prompts[-2:]):
                stream = await client.stream(prompt, max_new_tokens=NEW)
                count = 0
                async for _ in stream:
                    count += 1
                    if count == NEW // 2:
                        struck = swarm.member(stream.result.route[place].peer)
                        if place == 0:
                            await struck.kill()
                        else:
                            hung.enter_context(struck.hanging())
                assert stream.result.ids == alone[place - 2]
                assert stream.result.reroutes >= 1


@in_virtual_time
async def test_memory_is_the_packed_bytes(packed: Packed, tmp_path: Path) -> None:
    entries = Checkpoint(packed.folder).entries.values()
    held = sum(entry.nbytes for entry in entries)
    async with swarm_of(packed, tmp_path / "exact", {"a": "0:4"}) as (swarm, _):
        member = swarm.members["a"]
        assert held <= weights_bytes(member) < 1.1 * held
        hardware, room = member.node._hardware, measured(member.node._hardware, None)["room"]
        assert hardware is not None and sum(hardware.sizes.weight_bytes) == held
        assert room == {"units": 4, "of": 4, "packed": True, "experts": None} and hardware.holds.endswith(
            "hold 4 of 4 layers, packed"
        )
    async with swarm_of(packed, tmp_path / "plain", {"a": "0:4"}, products="plain") as (swarm, client):
        assert weights_bytes(swarm.members["a"]) > 4 * held
        assert (await client.generate(PROMPT, max_new_tokens=NEW)).ids == packed.plain.alone(PROMPT, NEW)


@in_virtual_time
async def test_it_says_how_many_layers_its_memory_holds(packed: Packed, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        swarm.create(packed.source)
        await swarm.bootstrap()
        member = swarm.node("a", memory_bytes=1 << 30)
        assert "its 1.1 GB hold 4 of 4 layers, packed" in (await member.wait_for("machine"))["text"]
        await member.wait_for("ready")
        assert member.node._host is not None
        claimed = [one for one in member.node._host.decisions.about("0") if one.what.startswith("takes layers")]
        assert "its memory holds 4 of 4 layers" in claimed[-1].facts


WIDTHS = {"exact": 1, "fast": 4}  # of mixtures; torch has other bits than ggml's graphs in the larger one


@pytest.fixture(params=WIDTHS)
def mixture(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Packed, str]:
    (tmp_path / "model").mkdir()
    save = partial(save_moe_gguf, experts=16, width=WIDTHS[request.param])
    return Packed(tmp_path / "model", save), request.param


def memory_for_five(sizes: UnitSizes, width: int = 1, units: tuple[int, int] = (0, UNITS)) -> int:
    """Return the memory with room for these units and 5 of 16 experts in each of the two layers."""
    expert_bytes = 3 * 64 * 128 * width**2 // 32 * 18
    need_bytes = sizes.need_bytes(*units, 512) - 2 * (16 - 5) * expert_bytes
    return limit_bytes_for(need_bytes) + buffer_bytes()


@in_virtual_time
async def test_adapters_work_on_a_mixture_larger_than_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_slots, "PIECE_BYTES", 2 * expert_slots.PAGE)
    (tmp_path / "model").mkdir()
    packed = Packed(tmp_path / "model", partial(save_moe_gguf, experts=16))
    saved = save_llama_adapter(tmp_path / "verse", packed.plain.folder, seed=1, layers="self_attn")
    merged = TinyModel(merged_checkpoint(tmp_path / "merged", packed.plain.folder, saved), UNITS)
    adapters = from_folders({"verse": saved}, packed.source, tmp_path / "adapters")
    sizes = unit_sizes(Checkpoint(packed.folder), dtype=torch.float32, keeps_packed=True)
    lent = {"memory_bytes": memory_for_five(sizes), "cache_tokens": 512}
    async with swarm_of(packed, tmp_path / "swarm", {"a": "0:4"}, adapters=adapters, **lent) as (swarm, client):
        hardware = swarm.members["a"].node._hardware
        assert hardware is not None and hardware.tier is not None and hardware.tier.slots == 5
        jobs = [(adapter, [*PROMPT, at]) for at in range(2) for adapter in ("verse", "")]
        found = await asyncio.gather(
            *(client.generate(prompt, max_new_tokens=NEW, adapter=adapter) for adapter, prompt in jobs)
        )
    for (adapter, prompt), result in zip(jobs, found, strict=True):
        assert result.ids == (merged if adapter else packed.plain).alone(prompt, NEW)
    assert merged.alone(PROMPT, NEW) != packed.plain.alone(PROMPT, NEW)


@in_virtual_time
async def test_a_mixture_larger_than_the_memory_says_the_same_and_tells_what_fits(
    mixture: tuple[Packed, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the machine with all in memory goes on with a text, or the other way round."""
    monkeypatch.setattr(expert_slots, "PIECE_BYTES", 2 * expert_slots.PAGE)  # buffers smaller than the tiny model
    packed, products = mixture
    alone = packed.plain.alone(PROMPT, NEW) if products == "exact" else fast_alone(packed, PROMPT)
    sizes = unit_sizes(Checkpoint(packed.folder), dtype=torch.float32, keeps_packed=True)
    memory_bytes = memory_for_five(sizes, WIDTHS[products])
    async with VirtualSwarm(tmp_path / "swarm") as swarm:
        invite = swarm.create(packed.source).invite
        await swarm.bootstrap()
        usual = {"swarm": invite, "dtype": "float32", "products": products}
        stage = {**usual, "memory_bytes": memory_bytes, "cache_tokens": 512}
        small = swarm.node("small", **stage)
        assert "memory for 5 of 16 experts a layer" in (await small.wait_for("experts"))["text"]
        told = (await small.wait_for("machine"))["text"]
        assert f"; its {format_bytes(memory_bytes)} hold 4 of 4 layers" in told, "as it was lent"
        await small.wait_for("ready")
        assert small.node._host is not None
        claimed = [one for one in small.node._host.decisions.about("0") if one.what.startswith("takes layers")]
        assert "its memory holds 4 of 4 layers, with 5 of 16 experts of each" in claimed[-1].facts
        async with swarm.client() as client:
            await sees_ready(client, 1)
            assert (await client.generate(PROMPT, max_new_tokens=NEW)).ids == alone
            read = {one.labels[-1]: one.value for one in small.node.readings() if one.metric is table.EXPERT_READS}
            assert read.keys() == {"hit", "read"} and min(read.values()) > 0
            part = {**stage, "memory_bytes": limit_bytes_for(sizes.need_bytes(1, 2, 512))}
            others = [swarm.node("large", "0:4", **usual), swarm.node("part", **part)]
            for other in others:
                await other.wait_for("ready")
                assert other.node._hardware is not None and other.node._hardware.tier is None
            await sees_ready(client, 3)
            stream = await client.stream(PROMPT, max_new_tokens=NEW)
            count = 0
            async for _token in stream:
                count += 1
                if count == NEW // 2:
                    await swarm.member(stream.result.route[0].peer).kill()
            assert stream.result.ids == alone and stream.result.reroutes >= 1


@in_virtual_time
async def test_a_machine_with_experts_on_its_disk_moves_pauses_and_leaves_amid_texts(
    mixture: tuple[Packed, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text is the same: that of the sessions of a lost machine whose layers it takes over, and of those that it hands over."""
    monkeypatch.setattr(expert_slots, "PIECE_BYTES", 2 * expert_slots.PAGE)
    packed, products = mixture
    prompts = [[*PROMPT, at] for at in range(3)]
    alone = [
        packed.plain.alone(prompt, NEW) if products == "exact" else fast_alone(packed, prompt) for prompt in prompts
    ]
    sizes = unit_sizes(Checkpoint(packed.folder), dtype=torch.float32, keeps_packed=True)
    memory_bytes = memory_for_five(sizes, WIDTHS[products], (1, 3))

    async with VirtualSwarm(tmp_path / "swarm") as swarm:
        usual = {"swarm": swarm.create(packed.source).invite, "dtype": "float32", "products": products}
        await swarm.bootstrap()

        async def whole(name: str, span: str) -> VirtualMember:
            member = swarm.node(name, span, **usual)
            await member.wait_for("ready")
            return member

        async def speak(act: Callable[[], Awaitable[object]]) -> None:
            """Compare texts in the middle of which something happens."""
            streams = [await client.stream(prompt, max_new_tokens=NEW) for prompt in prompts]
            texts = [aiter(stream) for stream in streams]
            for text in texts:
                await anext(text)
            await act()
            for text in texts:
                async for _ in text:
                    pass
            assert [stream.result.ids for stream in streams] == alone

        last = await whole("last", "2:4")
        disk = swarm.node("disk", **usual, memory_bytes=memory_bytes, cache_tokens=512)
        await disk.wait_for("ready")
        assert "memory for 5 of 16 experts a layer" in (await disk.wait_for("experts"))["text"]
        hardware = disk.node._hardware
        assert hardware is not None and hardware.capacity_units == 2, "readers' buffers are no room for layers"
        await whole("first", "0:2")
        async with swarm.client() as client:
            await sees_ready(client, 3)
            await speak(last.kill)  # nobody else has its layers, and only the machine with the disk may move
            (place,) = (peer["span"] for peer in client.status()["peers"] if peer["name"] == "disk")
            assert tuple(place) == (2, 4)
            assert {one.value > 0 for one in disk.node.readings() if one.metric is table.EXPERT_READS} == {True}

            other = await whole("other", "2:4")
            await sees_ready(client, 3)

            async def pause() -> None:
                disk.node.lending.pause("a film", keep=Keep.MEMORY)
                await disk.node.lending.until(LendingState.PAUSED)

            await speak(pause)
            disk.node.lending.resume()
            await disk.node.lending.until(LendingState.RUNNING)
            await sees_ready(client, 3)
            await speak(other.kill)  # the machine with the disk has its weights still
            await whole("another", "2:4")
            await sees_ready(client, 3)
            await speak(disk.stop)


@in_virtual_time
async def test_it_says_what_the_missing_package_would_gain(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_ggml(monkeypatch)
    async with VirtualSwarm(tmp_path) as swarm:
        swarm.create(packed.source)
        await swarm.bootstrap()
        member = swarm.node("a", memory_bytes=1 << 30)
        advice = (await member.wait_for("advice"))["text"]
        assert advice.startswith("This model would run 3 times faster and take ") and "xllamacpp" in advice
        await member.wait_for("ready")
        assert measured(member.node._hardware, None)["advice"] == advice


@in_virtual_time
async def test_rounded_products_announce_another_number_format(packed: Packed, tmp_path: Path) -> None:
    async with swarm_of(packed, tmp_path, {"a": "0:4"}, products="fast") as (_, client):
        await client.generate(PROMPT, max_new_tokens=NEW)
        peers = client._host.directory.peers().values()
        assert {peer.number_format for peer in peers if any(peer.span)} == {"packed"}


@in_virtual_time
async def test_adapters_work_on_a_packed_model(tmp_path: Path) -> None:
    packed = Packed(tmp_path, save_llama_gguf)
    saved = save_llama_adapter(tmp_path / "verse", packed.plain.folder, seed=1)
    merged = TinyModel(merged_checkpoint(tmp_path / "merged", packed.plain.folder, saved), UNITS)
    adapters = from_folders({"verse": saved}, packed.source, tmp_path / "adapters")
    async with swarm_of(packed, tmp_path / "swarm", {"a": "0:2", "b": "2:4"}, adapters=adapters) as (_, client):
        for adapter, model in (("verse", merged), ("", packed.plain)):
            result = await client.generate(PROMPT, max_new_tokens=NEW, adapter=adapter)
            assert result.ids == model.alone(PROMPT, NEW)
    assert merged.alone(PROMPT, NEW) != packed.plain.alone(PROMPT, NEW)


@in_virtual_time
async def test_an_older_machine_is_told_to_upgrade(packed: Packed, tmp_path: Path) -> None:
    manifest = VirtualSwarm(tmp_path).create(packed.source).manifest
    assert manifest is not None and manifest.format == PACKED_FORMAT and manifest.file(PACKED_NAME) is not None
    raw = encode_manifest(manifest)
    assert decode_manifest(raw) == manifest
    newer = raw.replace(b"\xa6format\x04", b"\xa6format\x09")
    with pytest.raises(ProtocolError, match=r"format 9.*upgrade swarmnode") as caught:
        decode_manifest(newer)
    assert caught.value.code == ErrorCode.VERSION


@in_virtual_time
async def test_a_file_that_changed_is_not_served(tmp_path: Path) -> None:
    packed = Packed(tmp_path, save_llama_gguf)
    async with VirtualSwarm(tmp_path / "swarm") as swarm:
        swarm.create(packed.source)
        data = bytearray(packed.file.read_bytes())
        data[-40] ^= 1
        packed.file.write_bytes(data)
        node = swarm.node("a", "0:4")
        await swarm.bootstrap()
        with pytest.raises(CheckpointError, match="changed or damaged"):
            await node.wait_for("ready")


@in_virtual_time
async def test_a_file_that_changes_while_it_is_served_is_withdrawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed = Packed(tmp_path, save_llama_gguf)
    async with VirtualSwarm(tmp_path / "swarm") as swarm:
        invite = swarm.create(packed.source).invite
        door = await swarm.bootstrap()
        first = swarm.node("a", "0:4", swarm=invite)
        await first.wait_for("ready")
        packed.file.touch()  # the same bytes are given again
        async with swarm.client() as client:
            await first.kill()
            second = swarm.node("b", "0:4", swarm=invite)
            await second.wait_for("ready")
            assert client.status()["ungiven"] == []
            await second.kill()
            data = bytearray(packed.file.read_bytes())
            data[-40] ^= 1
            packed.file.write_bytes(data)
            late, directory = swarm.node("c", "0:4", swarm=invite), client._host.directory
            while client.status()["ungiven"] != [0, 1, 2, 3]:
                await asyncio.wait_for(directory.changed(directory.revision), 120)
            assert "no longer offers weights.gguf to others" in caplog.text and "was changed" in caplog.text
            assert door._seeder.units == (0, 0) and all(told["event"] != "ready" for told in late.seen)


@in_virtual_time
async def test_a_manifest_asks_for_products(packed: Packed, tmp_path: Path) -> None:
    """Nodes follow it by themselves; one that says otherwise does not start, and one that does otherwise is left out."""
    async with VirtualSwarm(tmp_path) as swarm:
        swarm.create(packed.source, products=EXACT)
        await swarm.bootstrap()
        node = swarm.node("a", "0:4", dtype="auto", products="auto")
        await node.wait_for("ready")
        for options, words in (
            ({"products": FAST}, "--products fast: this swarm asks for exact products"),
            ({"dtype": "bfloat16"}, "--dtype bfloat16"),
            ({"quantize": "nf4"}, "--quantize nf4: this swarm asks for weights that are not rounded again"),
        ):
            with pytest.raises(UsageError, match=words):
                await swarm.node(f"refused-{len(words)}", "0:4", **options).wait_for("ready")
        older = swarm.node("older", "0:4", products=FAST)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                StageConfig, "meeting", lambda self, _least: self
            )  # as a version that does not know the field
            await older.wait_for("ready")
        async with swarm.client() as client:
            await sees_ready(client, 1)
            assert (await client.generate(PROMPT, max_new_tokens=NEW)).ids == packed.plain.alone(PROMPT, NEW)
            holders = {
                peer.name: peer.number_format for peer in client._host.directory.peers().values() if any(peer.span)
            }
            assert holders == {"a": "float32"}


@in_virtual_time
async def test_products_are_asked_of_packed_weights_alone(tmp_path: Path) -> None:
    save_llama(tmp_path / "plain", layers=1)
    with pytest.raises(UsageError, match="--products exact is for packed weights"):
        VirtualSwarm(tmp_path).create(tmp_path / "plain", products=EXACT)
