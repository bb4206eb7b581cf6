"""Nodes with a draft model: the same texts in fewer turns if it is good, and the same texts if it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.config import StageConfig
from swarmnode.errors import CheckpointError, LocalError, UsageError
from swarmnode.ledger import Account
from swarmnode.lending.lending import LendingState
from swarmnode.measuring.draft_part import draft_name, open_draft
from swarmnode.measuring.meters import by_proposer
from swarmnode.measuring.trace import Timeline
from swarmnode.node.node_config import NodeConfig
from swarmnode.peer.host_config import HostConfig
from swarmnode.serving.client.generation import Generation
from swarmnode.serving.drafting import model_drafter
from swarmnode.serving.serving_stage import ServingStage
from tests.mtp import WEIGHTS
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.test_kept_sessions import TWO_BY_TWO, swarm_of
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm, sees_ready
from tests.tiny import PROMPT, TinyModel

NEW = 32
TWO = {"n0": "0:3", "n1": "3:6"}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the same vocabulary and other weights: it guesses nothing right."""
    return save(tmp_path_factory.mktemp("other"), 512)


def save(folder: Path, vocabulary: int) -> Path:
    torch.manual_seed(9)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_hidden_layers=1, **sizes)).save_pretrained(folder)
    return folder


async def ask(client: SwarmClient, drafts: str = "auto", prompt: list[int] = PROMPT, **options: Any) -> Generation:
    stream = await client.stream(prompt, max_new_tokens=NEW, drafts=drafts, **options)
    async for _ in stream:
        pass
    return stream.result


def stage_of(member: VirtualMember) -> ServingStage:
    stage = member.node._stage
    assert isinstance(stage, ServingStage)
    return stage


def guesses(member: VirtualMember) -> dict[str, int]:
    """Right guesses at this node, by proposer."""
    counts = stage_of(member).server.meter.drafts
    return {proposer: count for (proposer, result), count in counts.items() if result == "accepted" and count}


@in_virtual_time
async def test_a_good_draft_model_saves_turns(
    founded: Founded, tiny: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with swarm_of(founded, tmp_path, TWO, draft_model=str(tiny.folder)) as (swarm, client):
        result = await ask(client)
        assert result.ids == tiny.alone(PROMPT, NEW)
        assert result.accepted_drafts > NEW / 2
        assert guesses(swarm.members["n0"])["model"] > NEW / 2 and not guesses(swarm.members["n1"])
        assert stage_of(swarm.members["n1"]).draft is None, "it does not hold the first layers"
        told, traces = by_proposer(result.drafts), await client.traces(bytes.fromhex(result.trace))
        assert told["model"]["accepted"] == guesses(swarm.members["n0"])["model"], "the client knows the proposers"
        assert by_proposer(Timeline(traces).drafts)["model"]["accepted"] == told["model"]["accepted"]
        name = tiny.folder.name
        assert {peer["name"]: peer["draft_model"] for peer in client.status()["peers"]} == {"n0": name, "n1": ""}
        named = by_proposer((await ask(client, name)).drafts)
        assert named["model"]["accepted"] > NEW / 2
        assert not caplog.records
        assert "model" not in by_proposer((await ask(client, "large")).drafts)
        assert f"no draft model 'large' (it has {name})" in caplog.text


@in_virtual_time
async def test_only_a_client_that_allows_it_is_served_by_the_model(
    founded: Founded, tiny: TinyModel, tmp_path: Path
) -> None:
    async with swarm_of(founded, tmp_path, TWO, draft_model=str(tiny.folder)) as (swarm, client):
        for drafts in ("lookup", "off"):
            assert (await ask(client, drafts)).ids == tiny.alone(PROMPT, NEW)
        assert "model" not in guesses(swarm.members["n0"])


@in_virtual_time
async def test_a_bad_draft_model_changes_nothing(
    founded: Founded, tiny: TinyModel, other: Path, tmp_path: Path
) -> None:
    async with swarm_of(founded, tmp_path, TWO, draft_model=str(other)) as (swarm, client):
        result = await ask(client)
        assert result.ids == tiny.alone(PROMPT, NEW)
        counts = stage_of(swarm.members["n0"]).server.meter.drafts
        assert counts["model", "wasted"] > 0, "it has guessed"


@in_virtual_time
async def test_the_text_goes_on_at_another_node_with_a_draft_model(
    founded: Founded, tiny: TinyModel, tmp_path: Path
) -> None:
    async with swarm_of(founded, tmp_path, TWO_BY_TWO, draft_model=str(tiny.folder)) as (swarm, client):
        stream = await client.stream(PROMPT, max_new_tokens=NEW, drafts="auto")
        ids = []
        async for token in stream:
            ids.append(token.id)
            if len(ids) == NEW // 4:
                await swarm.member(stream.result.route[0].peer).kill()
        assert ids == tiny.alone(PROMPT, NEW) and stream.result.reroutes
        first = swarm.member(stream.result.route[0].peer)
        assert guesses(first)["model"] > 0


@in_virtual_time
async def test_too_many_sessions_do_without_and_all_memory_is_given_back(
    founded: Founded, tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_drafter, "MAX_SESSIONS", 1)
    async with swarm_of(founded, tmp_path, TWO, draft_model=str(tiny.folder)) as (swarm, client):
        first = swarm.members["n0"]
        model, ledger = stage_of(first).draft, stage_of(first).hardware.lent[0].ledger
        assert model is not None
        streams = [aiter(await client.stream(PROMPT, max_new_tokens=NEW, drafts="auto")) for _ in range(2)]
        begun = [await anext(stream) for stream in streams]
        assert len(model._limits) == 1
        for stream, token in zip(streams, begun, strict=True):
            assert [token.id, *[one.id async for one in stream]] == tiny.alone(PROMPT, NEW)
        assert not model._limits and not model._runner._sessions
        await first.stop()
        assert ledger.accounts()[Account.WEIGHTS] == ledger.accounts()[Account.KV_CACHE] == 0


@in_virtual_time
async def test_a_draft_model_with_another_vocabulary_is_refused_at_once(founded: Founded, tmp_path: Path) -> None:
    draft = save(tmp_path / "draft", 500)
    with pytest.raises(UsageError, match=r"--draft-model .*: its vocabulary has 500 tokens, .* has 512: choose"):
        async with swarm_of(founded, tmp_path, {"n0": "0:3"}, draft_model=str(draft)):
            pass


@in_virtual_time
async def test_a_draft_model_takes_memory_from_the_layers(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        stage = StageConfig(draft_model=str(tiny.folder), memory_bytes=256 << 20)
        member = swarm.node("n0", "0:6", config=NodeConfig(HostConfig(tmp_path / "home", name="n0"), stage))
        await member.wait_for("ready")
        hardware = stage_of(member).hardware
        assert hardware.draft is not None and hardware.draft.cache_bytes > 0
        assert hardware.memory_bytes == (256 << 20) - hardware.draft.need_bytes
        small = replace(stage, memory_bytes=hardware.draft.need_bytes)
        late = swarm.node("n1", "0:6", config=NodeConfig(HostConfig(tmp_path / "late", name="n1"), small))
        with pytest.raises(LocalError, match=r"--draft-model needs .* are lent: lend more with --memory"):
            await late.wait_for("ready")


@in_virtual_time
async def test_the_draft_model_ends_with_a_pause_and_comes_back(
    founded: Founded, tiny: TinyModel, tmp_path: Path
) -> None:
    async with swarm_of(founded, tmp_path, TWO, draft_model=str(tiny.folder)) as (swarm, client):
        first = swarm.members["n0"]
        before, lending = stage_of(first).draft, first.node.lending
        lending.pause("a film")
        await lending.until(LendingState.PAUSED)
        lending.resume()
        await lending.until(LendingState.RUNNING)
        await sees_ready(client, 2)
        assert (await ask(client)).ids == tiny.alone(PROMPT, NEW)
        assert stage_of(first).draft not in (None, before) and guesses(first)["model"] > 0


def test_a_folder_with_tensors_that_nothing_uses_is_no_draft_model(tiny: TinyModel, tmp_path: Path) -> None:
    save(tmp_path / "draft", 512)
    stored = load_file(tmp_path / "draft" / WEIGHTS)
    save_file(stored | {"model.layers.0.medusa.weight": torch.ones(2, 2)}, tmp_path / "draft" / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"no place for, as model.layers.0.medusa.weight"):
        open_draft(str(tmp_path / "draft"), tmp_path / "index", Checkpoint(tiny.folder))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/home/me/SmolLM2-135M.Q4_1.gguf", "SmolLM2-135M.Q4_1"),
        ("org/Small-0.5B@main", "Small-0.5B"),
        ("./folder/", "folder"),
        ("a\tb" + "x" * 60, "ab" + "x" * 46),
    ],
)
def test_a_draft_model_has_a_short_name(model: str, name: str) -> None:
    assert draft_name(model) == name
