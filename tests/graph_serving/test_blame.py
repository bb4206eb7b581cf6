"""Peers that a pass through a graph names as at fault: the hop whose results are false, or the client whose values are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import INFER_PROTOCOL, Infer, Inferred
from swarmnode.compress.codecs import Encoded, decode_values, encode_values, payload_of
from swarmnode.compute.device import Device
from swarmnode.compute.graph.graph_segment import load_segment
from swarmnode.errors import ErrorCode, PeerError, PeerRefused, ProtocolError
from swarmnode.founding.model_source import ModelSource, from_module
from swarmnode.graph_serving.graph_stage import InferenceServer
from swarmnode.graph_serving.remote_module import RemoteModule
from swarmnode.links.link_config import LinkConfig
from swarmnode.measuring.hardware import LentDevice
from swarmnode.net.clock import Clock
from swarmnode.net.memory.network import FakeWorld
from swarmnode.peer.questions import ask_one, board_of
from tests.compute.inline_executor import InlineExecutor
from tests.net.virtual import in_virtual_time
from tests.peer.toy_peer import ToyPeer
from tests.segmenter import SIDE, segmenter

VALUES = (torch.randn(2, 1, SIDE, SIDE), torch.arange(2))


@dataclass
class ToyHost(ToyPeer):
    """Stands in for `Host`, as the leader of passes uses it."""

    clock: Clock = field(default_factory=Clock)
    standing: Any = None


class Scene:
    """A server of one hop, and the leader of passes of another peer."""

    def __init__(self, module: ModelSource) -> None:
        world = FakeWorld(seed=1)
        self.networks = [world.join(), world.join()]
        self.hop = self.networks[0].peer_id
        segment = load_segment(module.folder, 0, module.model.units)
        lent = LentDevice(Device("cpu", 0, "CPU", 1 << 30, 1 << 30, shared=True), 1 << 30)
        self.executor = InlineExecutor()
        self.server = InferenceServer(ToyPeer(self.networks[0], LinkConfig()), segment, self.executor, lent)
        self.host: Any = ToyHost(self.networks[1], LinkConfig())
        self.module = RemoteModule(
            self.host,
            segment.layout,
            lambda _span: None,  # type: ignore[arg-type, return-value]
            patience_s=1.0,
            on_served=lambda *_: None,
            audit_share=0.0,
        )

    async def ask(self) -> Sequence[Tensor]:
        return await self.module.ask(HopSpec(self.hop, 0, self.module.graph.units), VALUES, 2)


@asynccontextmanager
async def scene_of(module: ModelSource) -> AsyncIterator[Scene]:
    scene = Scene(module)
    await scene.server.start()
    await scene.networks[1].connect(await scene.networks[0].addresses(), timeout_s=1)
    yield scene
    await scene.module.close()
    await scene.server.close()
    await scene.executor.close()
    for network in scene.networks:
        await network.close()


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return from_module("tests.segmenter:segmenter", tmp_path_factory.mktemp("module") / "graph", units=2, trains=False)


def changed(change: Callable[[Tensor], Tensor]) -> Callable[[Encoded], Encoded]:
    def lie(honest: Encoded) -> Encoded:
        infos, payloads = honest
        return encode_values([change(value) for value in decode_values(infos, payload_of(payloads), "cpu")])

    return lie


LIES: dict[str, Callable[[Encoded], Encoded]] = {
    "NaN": changed(lambda value: value * torch.nan),
    "other shapes": changed(lambda value: value[:1]),
    "integers": changed(lambda value: value.int()),
    "fewer values": lambda honest: (honest[0][1:], honest[1][1:]),
    "a payload cut short": lambda honest: (honest[0], [bytes(payload)[:-1] for payload in honest[1]]),
}


@pytest.mark.parametrize("lie", LIES)
@in_virtual_time
async def test_the_leader_names_the_hop_whose_results_are_false(
    module: ModelSource, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    async with scene_of(module) as scene:
        with torch.no_grad():
            expected = segmenter()[0].eval()(*VALUES)
        for value, alone in zip(await scene.ask(), expected.values(), strict=True):
            torch.testing.assert_close(value, alone)
        honest = scene.server._compute
        monkeypatch.setattr(scene.server, "_compute", lambda *asked: LIES[lie](honest(*asked)))
        with pytest.raises(PeerError) as caught:
            await scene.ask()
        assert caught.value.peer == scene.hop
        assert isinstance(caught.value, PeerRefused if lie == "NaN" else ProtocolError)


@in_virtual_time
async def test_a_hop_names_the_client_whose_values_cannot_be_computed(
    module: ModelSource, caplog: pytest.LogCaptureFixture
) -> None:
    infos, payload = encode_values(VALUES)
    cut = [bytes(one)[:-1] for one in payload]
    async with scene_of(module) as scene:
        board = board_of(scene.host, INFER_PROTOCOL)
        for wrong in ((infos, cut), encode_values(VALUES[:1]), encode_values([VALUES[0], VALUES[1] + 1000])):
            question = Infer(0, module.model.units, wrong[0])
            with (
                caplog.at_level("INFO", logger="swarmnode.graph_serving.graph_stage"),
                pytest.raises(PeerRefused) as caught,
            ):
                await ask_one(board, scene.hop, question, Inferred, payload=wrong[1])
            assert caught.value.code in (ErrorCode.MALFORMED, ErrorCode.INVALID_REQUEST)
        assert caplog.text.count(f"refused a pass of {scene.networks[1].peer_id}") == 3
        await scene.ask()  # others are not disturbed
        await board.close()
