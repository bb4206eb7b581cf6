"""Sessions that ask for an adapter get what the changed model would say, from whichever peers compute it, and whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnode.client.adapters import ClientAdapters
from swarmnode.client.swarm_client import SwarmClient
from swarmnode.errors import ErrorCode, PeerRefused, UsageError
from swarmnode.founding.model_source import from_checkpoint
from swarmnode.founding.swarm_creation import from_folders
from swarmnode.ledger import Account
from swarmnode.lending.lending import Keep, LendingState
from swarmnode.metrics import table
from swarmnode.serving.client.generation import Generation
from swarmnode.swarm.records.announcement import parse_trust
from swarmnode.swarm.storage.swarmfile import save_swarm
from tests.adapters import merged_checkpoint, save_llama_adapter
from tests.net.virtual import in_virtual_time
from tests.node.audited_swarm import compute_anew, hop_in_use, span_of, three_by_two
from tests.node.audited_swarm import results as audit_results
from tests.node.conftest import Founded
from tests.node.turns import Turns
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm, sees_ready
from tests.tiny import PROMPT, TinyModel

NEW = 12
NAMES = ("verse", "prose")
TWO_BY_TWO = {"a1": "0:3", "b1": "3:6", "a2": "0:3", "b2": "3:6"}


class Adapted:
    """A swarm with two adapters, and by their names what one process says that has changed the model's weights; "" is the model."""

    def __init__(self, tiny: TinyModel, folder: Path) -> None:
        saved = {name: save_llama_adapter(folder / name, tiny.folder, seed=at) for at, name in enumerate(NAMES)}
        merged = {name: merged_checkpoint(folder / f"{name}-merged", tiny.folder, one) for name, one in saved.items()}
        self.models = {"": tiny, **{name: TinyModel(path, tiny.units) for name, path in merged.items()}}
        self.adapters = from_folders(saved, from_checkpoint(str(tiny.folder), folder / "none"), folder / "adapters")
        (folder / "founded").mkdir()
        self.founded = Founded.on(tiny.folder, folder / "founded", adapters=self.adapters)

    def alone(self, adapter: str, prompt: list[int] = PROMPT, new: int = NEW) -> list[int]:
        return self.models[adapter].alone(prompt, new)


@pytest.fixture(scope="module")
def adapted(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    made = Adapted(tiny, tmp_path_factory.mktemp("adapted"))
    assert len({tuple(made.alone(name)) for name in made.models}) == 3, (
        "adapters that change nothing would prove nothing"
    )
    return made


def file_with(swarm: VirtualSwarm, adapters: Path | None, name: str) -> Path:
    """The swarm's file as of a machine with another folder of adapters, or with none."""
    file = swarm.folder / f"{name}.swarm"
    save_swarm(replace(swarm.load(), adapters=adapters), file)
    return file


@asynccontextmanager
async def swarm_of(
    adapted: Adapted, folder: Path, spans: dict[str, str], **stage: Any
) -> AsyncIterator[tuple[VirtualSwarm, SwarmClient]]:
    """Nodes that have no adapters of their own; the bootstrap peer gives them."""
    async with VirtualSwarm(folder) as swarm:
        adapted.founded.into(swarm)
        await swarm.bootstrap()
        for name, span in spans.items():
            swarm.node(name, span, swarm=file_with(swarm, None, "elsewhere"), **stage)
        for member in swarm.members.values():
            await member.wait_for("ready")
        async with swarm.client() as client:
            await sees_ready(client, len(spans))
            yield swarm, client


def held_bytes(member: VirtualMember) -> int:
    host = member.node._host
    assert host is not None
    return host.link_config.ledger.accounts()[Account.ADAPTERS]


async def ask(client: SwarmClient, adapter: str, owner: str = "me", prompt: list[int] = PROMPT) -> Generation:
    stream = await client.stream(prompt, kept_for=owner, max_new_tokens=NEW, adapter=adapter)
    async for _ in stream:
        pass
    return stream.result


@in_virtual_time
async def test_sessions_beside_one_another_each_with_its_adapter(adapted: Adapted, tmp_path: Path) -> None:
    async with swarm_of(adapted, tmp_path, {"a": "0:3", "b": "3:6"}) as (swarm, client):
        assert not held_bytes(swarm.members["a"]), "nothing is loaded that nobody has asked for"
        wanted = ["", "verse", "prose", "verse", "", "prose"]
        results = await asyncio.gather(*(client.generate(PROMPT, max_new_tokens=NEW, adapter=name) for name in wanted))
        assert [result.ids for result in results] == [adapted.alone(name) for name in wanted]
        assert all(not result.faults or {code for _, code in result.faults} == {"BUSY"} for result in results)
        assert held_bytes(swarm.members["a"]) > 0
        assert client.status()["adapters"] == list(NAMES)


@in_virtual_time
async def test_an_unknown_adapter_is_told_before_anything_is_sent(adapted: Adapted, tmp_path: Path) -> None:
    async with swarm_of(adapted, tmp_path, {"a": "0:6"}) as (swarm, client):
        with pytest.raises(UsageError, match=r"no adapter 'rhyme': it has verse, prose"):
            await client.generate(PROMPT, adapter="rhyme")
        with pytest.raises(UsageError, match="rhyme"):
            await client.acausal_lm(adapter="rhyme")
        with pytest.raises(UsageError, match="hold_ends"):
            await client.acausal_lm(adapter="verse", hold_ends=True)
        assert sum(one.value for one in swarm.members["a"].node.readings() if one.metric is table.REFUSALS) == 0


@in_virtual_time
async def test_a_hop_refuses_an_adapter_that_the_swarm_does_not_have(
    adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def as_given(_self: ClientAdapters, name: str) -> str:
        return name

    monkeypatch.setattr(ClientAdapters, "resolve", as_given)
    async with swarm_of(adapted, tmp_path, {"a": "0:6", "b": "0:6"}) as (_, client):
        with pytest.raises(PeerRefused) as caught:
            await client.generate(PROMPT, adapter="../config")
        assert caught.value.code == ErrorCode.INVALID_REQUEST
        assert (await client.generate(PROMPT, max_new_tokens=NEW)).ids == adapted.alone(""), "nobody is left out for it"


@in_virtual_time
async def test_a_hop_is_killed_and_the_text_goes_on_with_the_same_adapter(adapted: Adapted, tmp_path: Path) -> None:
    async with swarm_of(adapted, tmp_path, TWO_BY_TWO) as (swarm, client):
        for place in (0, 1):
            stream = await client.stream(PROMPT, max_new_tokens=NEW, adapter="verse")
            count = 0
            async for _ in stream:
                count += 1
                if count == NEW // 2:
                    await swarm.member(stream.result.route[place].peer).kill()
            assert stream.result.ids == adapted.alone("verse")
            assert stream.result.reroutes >= 1


@in_virtual_time
async def test_what_is_kept_of_one_adapter_is_of_no_use_to_another(adapted: Adapted, tmp_path: Path) -> None:
    async with swarm_of(adapted, tmp_path, {"a": "0:3", "b": "3:6"}) as (_, client):
        prompt = PROMPT * 4
        for name in ("", "verse", "prose"):
            first = await ask(client, name, prompt=prompt)
            assert (first.ids, first.cached_tokens) == (adapted.alone(name, prompt), 0), name
        for name in ("prose", "", "verse"):
            again = await ask(client, name, prompt=prompt)
            assert again.ids == adapted.alone(name, prompt), name
            assert again.cached_tokens == len(prompt) - 1, name


@in_virtual_time
async def test_prompts_that_come_at_once_share_their_beginning_with_those_of_their_adapter(
    adapted: Adapted, tmp_path: Path
) -> None:
    async with swarm_of(adapted, tmp_path, {"a": "0:3", "b": "3:6"}) as (_, client):
        prompt = PROMPT * 50  # long enough to wait for
        names = ["verse", "prose", "", "verse", "prose", ""]
        results = await asyncio.gather(*(ask(client, name, prompt=[*prompt, at]) for at, name in enumerate(names)))
        for at, (name, result) in enumerate(zip(names, results, strict=True)):
            assert result.ids == adapted.alone(name, [*prompt, at]), (at, name)
        assert sum(result.cached_tokens > 0 for result in results) == 3, "each of the second of two"


@pytest.mark.parametrize("keep", list(Keep))
def test_a_node_that_was_paused_has_its_adapters_again(adapted: Adapted, tmp_path: Path, keep: Keep) -> None:
    @in_virtual_time
    async def paused() -> None:
        async with swarm_of(adapted, tmp_path, {"a": "0:6"}) as (swarm, client):
            node = swarm.members["a"]
            assert (await client.generate(PROMPT, max_new_tokens=NEW, adapter="verse")).ids == adapted.alone("verse")
            node.node.lending.pause("a film", keep=keep)
            await node.node.lending.until(LendingState.PAUSED)
            assert held_bytes(node) == 0
            node.node.lending.resume()
            await node.node.lending.until(LendingState.RUNNING)
            for name in ("", "prose", "verse"):
                assert (await client.generate(PROMPT, max_new_tokens=NEW, adapter=name)).ids == adapted.alone(name)

    paused()


async def ask_until(client: SwarmClient, holds: Callable[[], bool]) -> None:
    """Texts through an adapter, one after the other: the first audits may come before all have fetched it."""
    for _ in range(12):
        await client.generate(PROMPT, max_new_tokens=NEW, adapter="verse")
        await client.auditor.idle()
        if holds():
            return
    raise AssertionError(f"12 texts were audited: {audit_results(client)}")


@in_virtual_time
async def test_texts_through_an_adapter_are_audited_through_it(adapted: Adapted, tmp_path: Path) -> None:
    async with three_by_two(adapted.founded.into, tmp_path) as (_, client):
        await ask_until(client, lambda: audit_results(client).get("passed", 0) >= 2)
        assert not audit_results(client).keys() & {"false", "doubt"} and not client.auditor.standing.shunned


@in_virtual_time
async def test_a_hop_that_leaves_the_adapter_out_is_found(adapted: Adapted, tmp_path: Path) -> None:
    async with three_by_two(adapted.founded.into, tmp_path) as (swarm, client):
        await ask_until(client, lambda: audit_results(client).get("passed", 0) >= 1)
        liar = await hop_in_use(swarm, client, 0)
        span = span_of(liar)
        forward = span.forward
        span.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "adapters": ()})  # type: ignore[method-assign]
        compute_anew(liar)
        await ask_until(client, lambda: bool(client.auditor.standing.shunned))
        assert client.auditor.standing.shunned == {liar.peer}


@in_virtual_time
async def test_transformers_generate_through_an_adapter(adapted: Adapted, tmp_path: Path) -> None:
    async with swarm_of(adapted, tmp_path, {"a": "0:3", "b": "3:6"}) as (_, client):
        turns, model = Turns(), await client.acausal_lm(adapter="prose")
        model.run = turns.ask
        arguments = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        ids = await turns.run(lambda: model.generate(torch.tensor([PROMPT]), **arguments))
        assert ids[0, len(PROMPT) :].tolist() == adapted.alone("prose")


@in_virtual_time
async def test_who_has_fetched_an_adapter_gives_it_to_others(adapted: Adapted, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        adapted.founded.into(swarm)
        swarm.file = file_with(swarm, None, "elsewhere")
        await swarm.bootstrap()
        founder = swarm.node("founder", "0:6", swarm=file_with(swarm, adapted.adapters.folder, "founder"))
        await founder.wait_for("ready")
        first = swarm.node("first", "0:6")
        await first.wait_for("ready")
        async with swarm.client(trust=parse_trust([first.peer])) as client:
            assert (await ask(client, "verse")).ids == adapted.alone("verse")
        await founder.kill()
        second = swarm.node("second", "0:6")
        await second.wait_for("ready")
        async with swarm.client(trust=parse_trust([second.peer])) as client:
            assert (await ask(client, "verse")).ids == adapted.alone("verse")


@in_virtual_time
async def test_a_false_adapter_is_refused_and_its_giver_alone_is_left_out(adapted: Adapted, tmp_path: Path) -> None:
    async with swarm_of(adapted, tmp_path, {"a": "0:6"}) as (swarm, client):
        folder = tmp_path / "false"
        folder.mkdir()
        for file in adapted.adapters.folder.iterdir():
            raw = bytearray(file.read_bytes())
            raw[-1] ^= 1
            (folder / file.name).write_bytes(raw)
        liar = swarm.node("liar", "0:6", swarm=file_with(swarm, folder, "liar"))
        await liar.wait_for("ready")
        assert (await ask(client, "verse")).ids == adapted.alone("verse")
        async with swarm.client(trust=parse_trust([liar.peer])) as wary:
            assert (await ask(wary, "verse")).ids == adapted.alone("verse"), (
                "it asks others, as its own folder is not right"
            )


@in_virtual_time
async def test_an_adapter_that_nobody_gives_is_told(adapted: Adapted, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        adapted.founded.into(swarm)
        swarm.file = file_with(swarm, None, "elsewhere")
        await swarm.bootstrap()
        node = swarm.node("a", "0:6")
        await node.wait_for("ready")
        async with swarm.client(patience_s=60.0) as client:
            with pytest.raises(PeerRefused) as caught:
                await client.generate(PROMPT, adapter="verse")
            assert caught.value.code == ErrorCode.NOT_FOUND
            assert (await client.generate(PROMPT, max_new_tokens=NEW)).ids == adapted.alone("")
