"""Adapters that members bring: used by those whom they are for, within quotas, as long as they last, and without a trace after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.codec.messages import AdapterTicket, Open
from swarmnode.config import ServerConfig, StageConfig
from swarmnode.errors import CheckpointError, ErrorCode, PeerRefused, UsageError
from swarmnode.ledger import Account
from swarmnode.node.node_config import NodeConfig
from swarmnode.peer.host_config import HostConfig
from swarmnode.swarm.records.adapter_record import MAX_LIFE_S, Share, open_adapter, signed_ticket
from swarmnode.swarm.storage import own_adapters
from swarmnode.swarm.storage.content import FileContent
from swarmnode.swarm.storage.own_adapters import AdapterTerms, BlockedAdapters, OwnAdapters
from swarmnode.weights import adapter_files, adapter_offers
from swarmnode.weights.adapter_files import SWEEP_S
from swarmnode.weights.sources import PeerSource
from tests.adapters import merged_checkpoint, save_llama_adapter
from tests.net.virtual import in_virtual_time
from tests.node.audited_swarm import results as audit_results
from tests.node.audited_swarm import three_by_two
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm, sees_ready
from tests.tiny import PROMPT, TinyModel

NEW = 12
TWO = {"a": "0:3", "b": "3:6"}


@dataclass(frozen=True)
class Poets:
    """A swarm without adapters, the folders of two that members have, and what one process says with each; "" is the model."""

    founded: Founded
    folders: dict[str, Path]
    texts: dict[str, list[int]]


@pytest.fixture(scope="module")
def poets(tiny: TinyModel, founded: Founded, tmp_path_factory: pytest.TempPathFactory) -> Poets:
    folder = tmp_path_factory.mktemp("poets")
    folders = {
        name: save_llama_adapter(folder / name, tiny.folder, seed=at) for at, name in enumerate(("verse", "prose"))
    }
    models = {name: merged_checkpoint(folder / f"{name}-merged", tiny.folder, one) for name, one in folders.items()}
    texts = {name: TinyModel(path, tiny.units).alone(PROMPT, NEW) for name, path in models.items()}
    return Poets(founded, folders, {"": tiny.alone(PROMPT, NEW), **texts})


@asynccontextmanager
async def swarm_of(
    poets: Poets, folder: Path, spans: dict[str, str], *, adapters: str = "members", **limits: int
) -> AsyncIterator[VirtualSwarm]:
    """Nodes that hold these layers; `limits` are ServerConfig's fields."""
    async with VirtualSwarm(folder) as swarm:
        poets.founded.into(swarm)
        await swarm.bootstrap()
        for name, span in spans.items():
            host = HostConfig(folder / "homes" / name, name=name, adapters=adapters)
            swarm.node(name, span, config=NodeConfig(host, StageConfig(server=ServerConfig(**limits))))
        for member in swarm.members.values():
            await member.wait_for("ready")
        yield swarm


def kept_files(member: VirtualMember) -> list[Path]:
    """What a node has on its disk of adapters."""
    return sorted((member.home / "weights").glob("*/*adapter-*"))


def held_bytes(member: VirtualMember) -> int:
    assert member.node._host is not None
    return member.node._host.link_config.ledger.accounts()[Account.ADAPTERS]


async def ask(client: SwarmClient, adapter: object) -> list[int]:
    return (await client.generate(PROMPT, max_new_tokens=NEW, adapter=str(adapter))).ids


async def refusal_of(client: SwarmClient, adapter: object) -> ErrorCode:
    with pytest.raises(PeerRefused) as caught:
        await ask(client, adapter)
    return ErrorCode(caught.value.code)


def add(home: Path, poets: Poets, name: str, share: Share = Share.PRIVATE, *, ends: float) -> None:
    terms = AdapterTerms(name, share, int(ends), 4)
    OwnAdapters(home, poets.founded.swarm.id).add(poets.folders[name], terms)


@in_virtual_time
async def test_folders_are_used_beside_one_another_and_nothing_is_left_after_their_time(
    poets: Poets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_adapters, "RECORD_S", 60)
    async with swarm_of(poets, tmp_path, {**TWO, "a2": "0:3"}) as swarm, swarm.client() as client:
        await sees_ready(client, 3)
        wanted = ["", "verse", "prose", "verse"]
        texts = await asyncio.gather(*(ask(client, poets.folders.get(name, "")) for name in wanted))
        assert texts == [poets.texts[name] for name in wanted]
        stream = await client.stream(PROMPT, max_new_tokens=NEW, adapter=str(poets.folders["verse"]))
        count = 0
        async for _ in stream:
            count += 1
            if count == NEW // 2:
                await swarm.member(stream.result.route[0].peer).kill()
        assert (stream.result.ids, stream.result.reroutes >= 1) == (poets.texts["verse"], True)
        living = [member for member in swarm.members.values() if not member.over]
        assert all(kept_files(member) and held_bytes(member) for member in living)
        await asyncio.sleep(60 + 2 * SWEEP_S)
        assert [(kept_files(member), held_bytes(member)) for member in living] == [([], 0)] * 2
        assert await ask(client, poets.folders["verse"]) == poets.texts["verse"], "its owner signs a new record"


@in_virtual_time
async def test_a_private_one_is_neither_opened_nor_read_by_another_member(poets: Poets, tmp_path: Path) -> None:
    async with swarm_of(poets, tmp_path, TWO) as swarm, swarm.client() as owner, swarm.client() as thief:
        add(owner._host.config.home, poets, "verse", ends=swarm.unix() + MAX_LIFE_S)
        assert await ask(owner, "verse") == poets.texts["verse"]
        with pytest.raises(UsageError, match="no adapter 'verse': it has none"):
            await ask(thief, "verse")
        (path,) = (one for one in kept_files(swarm.members["a"]) if one.suffix == ".record")
        raw, swarm_id = path.read_bytes(), poets.founded.swarm.id
        record = open_adapter(raw, swarm_id, lambda *_: True)

        async def resolve(_name: str) -> str:
            return record.id

        async def with_own_signature(opened: Open) -> Open:
            key = await thief.adapters._key()
            ticket = signed_ticket(opened, raw, record, key.sign, thief.peer_id, swarm.unix())
            return msgspec.structs.replace(opened, ticket=ticket)

        async def without_any(opened: Open) -> Open:
            return msgspec.structs.replace(opened, ticket=AdapterTicket(raw))

        async def without_a_ticket(opened: Open) -> Open:
            return opened

        thief.adapters.resolve = resolve  # type: ignore[method-assign]
        for way, code in (
            (with_own_signature, ErrorCode.ADAPTER_PRIVATE),
            (without_any, ErrorCode.ADAPTER_PRIVATE),
            (without_a_ticket, ErrorCode.INVALID_REQUEST),
        ):
            thief.adapters.with_adapter = way  # type: ignore[method-assign, assignment]
            assert await refusal_of(thief, record.id) == code
        board = (await thief._files.weights())._board
        for member in swarm.members.values():
            for file in record.info.files:
                with pytest.raises(PeerRefused) as caught:
                    await PeerSource(board, member.peer).hashes(FileContent(file.name, file.size, file.root))
                assert caught.value.code == ErrorCode.NOT_FOUND


@in_virtual_time
async def test_a_shared_one_is_found_by_its_name_until_its_owner_takes_it_back(
    poets: Poets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_files, "LIST_S", 10.0)
    monkeypatch.setattr(adapter_offers, "LISTED_S", 30.0)
    async with swarm_of(poets, tmp_path, TWO) as swarm, swarm.client() as other:
        home = swarm.members["a"].home
        add(home, poets, "verse", Share.MEMBERS, ends=swarm.unix() + MAX_LIFE_S)
        add(home, poets, "prose", ends=swarm.unix() + MAX_LIFE_S)
        await asyncio.sleep(11.0)
        assert [one.record.name for one in await other.adapters.shared()] == ["verse"]
        assert await other.adapters.offered() == [], "it is not for the users of gateways"
        assert await ask(other, "verse") == poets.texts["verse"]
        (shared,) = await other.adapters.shared()
        assert await ask(other, shared.record.id[:8]) == poets.texts["verse"]
        with pytest.raises(UsageError, match="no adapter 'prose': it has verse"):
            await ask(other, "prose")
        add(swarm.members["b"].home, poets, "verse", Share.ALL, ends=swarm.unix() + MAX_LIFE_S)
        await asyncio.sleep(21.0)
        with pytest.raises(UsageError, match="several members share an adapter 'verse': choose one by its id"):
            await ask(other, "verse")
        (name,) = await other.adapters.offered()
        assert (len(name), await ask(other, name)) == (8, poets.texts["verse"])
        for member in swarm.members.values():
            for own in OwnAdapters(member.home, poets.founded.swarm.id).all():
                OwnAdapters(member.home, poets.founded.swarm.id).remove(own.terms.name)
        await asyncio.sleep(51.0)
        assert await other.adapters.shared() == []


@in_virtual_time
async def test_quotas_are_checked_before_anything_is_fetched(poets: Poets, tmp_path: Path) -> None:
    async with swarm_of(poets, tmp_path, {"a": "0:6"}, owner_adapters=1) as swarm, swarm.client() as client:
        assert await ask(client, poets.folders["verse"]) == poets.texts["verse"]
        files = kept_files(swarm.members["a"])
        assert await refusal_of(client, poets.folders["prose"]) == ErrorCode.ADAPTER_QUOTA
        assert kept_files(swarm.members["a"]) == files
        async with swarm.client() as another:
            assert await ask(another, poets.folders["prose"]) == poets.texts["prose"]


@in_virtual_time
async def test_one_that_is_unused_makes_room_for_that_of_another_member(poets: Poets, tmp_path: Path) -> None:
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in poets.folders.values()]
    async with (
        swarm_of(poets, tmp_path, {"a": "0:6"}, adapter_bytes=max(sizes)) as swarm,
        swarm.client() as client,
        swarm.client() as another,
    ):
        assert await ask(client, poets.folders["verse"]) == poets.texts["verse"]
        assert await ask(another, poets.folders["prose"]) == poets.texts["prose"]
        assert len([one for one in kept_files(swarm.members["a"]) if one.suffix == ".record"]) == 1
        assert await ask(client, poets.folders["verse"]) == poets.texts["verse"]


@in_virtual_time
async def test_the_owner_of_a_node_blocks_one_and_the_text_goes_on_elsewhere(poets: Poets, tmp_path: Path) -> None:
    async with swarm_of(poets, tmp_path, {"a": "0:6", "b": "0:6"}) as swarm, swarm.client() as client:
        await sees_ready(client, 2)
        stream = await client.stream(PROMPT, max_new_tokens=NEW, adapter=str(poets.folders["verse"]))
        adapter = await client.adapters.resolve(str(poets.folders["verse"]))
        count = 0
        async for _ in stream:
            count += 1
            if count == 2:
                first = swarm.member(stream.result.route[0].peer)
                BlockedAdapters(first.home).block(adapter)
                await asyncio.sleep(2 * SWEEP_S)
        assert (stream.result.ids, kept_files(first), held_bytes(first)) == (poets.texts["verse"], [], 0)
        for member in swarm.members.values():
            BlockedAdapters(member.home).block(adapter)
        await asyncio.sleep(2 * SWEEP_S)
        assert await refusal_of(client, poets.folders["verse"]) == ErrorCode.ADAPTER_REFUSED
        assert await ask(client, "") == poets.texts[""], "nobody is left out for it"


@in_virtual_time
async def test_a_node_may_take_none_of_members(poets: Poets, tmp_path: Path) -> None:
    async with swarm_of(poets, tmp_path, {"a": "0:6"}, adapters="manifest") as swarm, swarm.client() as client:
        assert await refusal_of(client, poets.folders["verse"]) == ErrorCode.ADAPTER_REFUSED
        assert kept_files(swarm.members["a"]) == []


@in_virtual_time
async def test_a_node_that_starts_again_knows_what_it_holds(poets: Poets, tmp_path: Path) -> None:
    async with swarm_of(poets, tmp_path, {"a": "0:6"}) as swarm, swarm.client() as client:
        assert await ask(client, poets.folders["verse"]) == poets.texts["verse"]
        await swarm.members["a"].stop()
        files = kept_files(swarm.members["a"])
        again = swarm.node("a", "0:6")
        await again.wait_for("ready")
        await sees_ready(client, 1)
        assert kept_files(again) == files
        assert await ask(client, poets.folders["verse"]) == poets.texts["verse"]


@in_virtual_time
async def test_one_that_does_not_fit_the_model_is_told_before_anything_is_sent(poets: Poets, tmp_path: Path) -> None:
    def changed(name: str, change: object) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_bytes((poets.folders["verse"] / "adapter_config.json").read_bytes())
        tensors = load_file(poets.folders["verse"] / "adapter_model.safetensors")
        save_file({key: one.contiguous() for key, one in change(tensors).items()}, folder / "adapter_model.safetensors")  # type: ignore[operator]
        return folder

    unknown = changed(
        "unknown", lambda tensors: {key.replace("q_proj", "elsewhere"): one for key, one in tensors.items()}
    )
    narrow = changed(
        "narrow", lambda tensors: {key: one[:, :8] if "_A" in key else one for key, one in tensors.items()}
    )
    nan = changed("nan", lambda tensors: {key: torch.full_like(one, torch.nan) for key, one in tensors.items()})
    async with swarm_of(poets, tmp_path, {"a": "0:6"}) as swarm, swarm.client() as client:
        for folder, told in ((unknown, "has no layer"), (narrow, "use an adapter of this model"), (nan, "NaN")):
            with pytest.raises(CheckpointError, match=told):
                await ask(client, folder)
        add(client._host.config.home, poets, "verse", ends=swarm.unix() - 1)
        with pytest.raises(UsageError, match="expired on"):
            await ask(client, "verse")

        async def unchecked(_folder: Path) -> int:
            return 4

        client.adapters.check = unchecked  # type: ignore[method-assign]
        beside = asyncio.ensure_future(ask(client, ""))
        assert await refusal_of(client, nan) == ErrorCode.INVALID_REQUEST
        assert await beside == poets.texts[""]
        assert held_bytes(swarm.members["a"]) == 0


@in_virtual_time
async def test_texts_through_a_private_one_are_audited_through_it(poets: Poets, tmp_path: Path) -> None:
    async with three_by_two(poets.founded.into, tmp_path, last=2) as (_, client):
        for _ in range(12):
            assert await ask(client, poets.folders["verse"]) == poets.texts["verse"]
            await client.auditor.idle()
            if audit_results(client).get("passed", 0):
                break
        assert audit_results(client).get("passed", 0)
        assert not audit_results(client).keys() & {"false", "doubt"} and not client.auditor.standing.shunned
