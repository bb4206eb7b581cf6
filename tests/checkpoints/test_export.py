"""A training becomes a checkpoint: from peers that have its parts, or not at all."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from swarmnode.checkpoints.checkpoint_export import export
from swarmnode.checkpoints.state_exchange import StateServer
from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import Hello
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.snapshot import write_step
from swarmnode.errors import LocalError, PeerRefused, UsageError
from swarmnode.links.link_config import LinkConfig
from swarmnode.swarm.records.manifest import Manifest, ModelInfo, encode_manifest
from swarmnode.swarm.storage.content import checkpoint_files, describe_files
from swarmnode.swarm.storage.state_store import StateStore
from swarmnode.swarm.storage.swarmfile import Swarm, new_swarm
from tests.compute.training.conftest import build, learners, make_run, train
from tests.peer.memory_network import MemoryNetwork
from tests.peer.toy_peer import ToyPeer

UNITS = 5
RUN = make_run(checkpoint_steps=1)


class World:
    """A swarm of a tiny GPT-2 whose two stages have trained for some steps, and somebody who wants the model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        build("gpt2").save_pretrained(folder / "model")
        files = describe_files(checkpoint_files(folder / "model"))
        swarm = new_swarm(encode_manifest(Manifest("m", ModelInfo("gpt2", UNITS, 32), files, created=1)))
        self.hello = Hello(VERSION, swarm.id)
        self.peers: dict[str, Any] = {}
        self.stages = learners(Checkpoint(folder / "model"), RUN, (0, 2, UNITS))
        self.stores: list[StateStore] = []
        self.servers: list[StateServer] = []
        self.host: Any = SimpleNamespace(
            swarm=Swarm(swarm.id, "m", (), swarm.manifest_bytes, swarm.manifest, folder / "model"),
            network=MemoryNetwork(self.peers, "me"),  # type: ignore[no-untyped-call]
            peer_id="me",
            hello=self.hello,
            link_config=LinkConfig(),
            directory=SimpleNamespace(peers=lambda: dict.fromkeys(self.peers), ready_after=dict),
            config=SimpleNamespace(home=folder / "home", max_cache_bytes=None, weights=None),
        )

    async def start(self, stage: int) -> None:
        """A peer with the states of one stage."""
        network = MemoryNetwork(self.peers, f"stage {stage}")  # type: ignore[no-untyped-call]
        store = StateStore(self.folder / network.peer_id, RUN)

        async def fresh(_at_least: int) -> int:
            return self.stages[stage].step

        self.stores.append(store)
        server = StateServer(ToyPeer(network, LinkConfig(), self.hello))
        server.give(store, fresh)
        await server.serve()
        self.servers.append(server)

    def train(self, steps: int) -> None:
        train(self.stages, steps)

    def keep(self, *stages: int) -> None:
        """These stages write down the step that they are at."""
        for number in stages:
            stage = self.stages[number]
            write_step(self.stores[number], stage.step, {block: stage.state(block) for block in stage.blocks})

    def parameters(self) -> dict[str, torch.Tensor]:
        named = {name: t.clone() for stage in self.stages for b in stage.blocks for name, t in stage.state(b).items()}
        return {name.removeprefix("parameter/"): t for name, t in named.items() if name.startswith("parameter/")}

    async def export(self, out: Path, *, force: bool = False) -> int:
        return await export(self.host, out, force=force, patience_s=0.1)

    async def close(self) -> None:
        for thing in (*self.servers, *self.peers.values()):
            await thing.close()
        for store in self.stores:
            store.close()


@pytest_asyncio.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr("swarmnode.checkpoints.checkpoint_export.AGAIN_S", 0.01)
    monkeypatch.setattr("swarmnode.checkpoints.state_exchange.FRESH_EVERY_S", 0.0)
    world = World(tmp_path)
    for stage in (0, 1):
        await world.start(stage)
    yield world
    await world.close()


async def test_the_newest_common_step_becomes_a_checkpoint(world: World) -> None:
    world.train(1)
    world.keep(0, 1)
    expected = world.parameters()
    world.stages[0].step = 2
    world.keep(0)  # the other one has not come so far
    out = world.folder / "out"
    assert await world.export(out) == 1
    loaded = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    assert not list((world.folder / "home" / "exports").glob("*/*")), "what was fetched is not kept"


async def test_what_is_there_is_not_overwritten(world: World) -> None:
    out = world.folder / "out"
    out.mkdir()
    (out / "mine").write_text("precious")
    with pytest.raises(UsageError, match="exists; name a folder"):
        await world.export(out)
    (out / "mine").unlink()
    world.keep(0, 1)
    assert await world.export(out) == 0
    assert (out / "model.safetensors").is_file()
    with pytest.raises(UsageError, match="--force"):
        await world.export(out)
    assert await world.export(out, force=True) == 0


async def test_what_is_missing_is_told(world: World) -> None:
    out = world.folder / "out"
    with pytest.raises(PeerRefused, match="is it being trained"):
        await world.export(out)
    world.keep(0)
    with pytest.raises(PeerRefused, match=r"no peer has a training state of layers \[2, 3, 4\]"):
        await world.export(out)
    world.stages[1].step = 1
    world.keep(1)
    with pytest.raises(PeerRefused, match="no step of all layers together"):
        await world.export(out)
    assert not out.exists()


async def test_a_full_disk_leaves_nothing_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.keep(0, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(LocalError, match="No space left on device"):
        patch.setattr("swarmnode.compute.training.snapshot.write_shards", full)
        await world.export(world.folder / "out")
    assert not list(world.folder.glob("*out*"))
    assert await world.export(world.folder / "out") == 0, "and nothing is in the way of the next attempt"
