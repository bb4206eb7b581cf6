"""Whatever a peer sends of a session, no position beyond the model's table gets to the card: it would be lost for everybody."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swarmnode.codec.body import Body, HopSpec
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Attach, End, Error, Input, Mode, Open, Output, Truncate, Want
from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import encode
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner
from swarmnode.config import ServerConfig
from swarmnode.ledger import MemoryLedger
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.memory.network import FakeWorld
from swarmnode.serving.client.client_session import SESSION_PROTOCOL
from swarmnode.serving.pipeline import Pipeline
from swarmnode.serving.worker import Worker
from tests.card.conftest import LAYERS, POSITIONS
from tests.compute.inline_executor import InlineExecutor
from tests.net.virtual import in_virtual_time
from tests.peer.toy_swarm import HELLO, ToyPeer, link_config, stage_server

UNITS = LAYERS + 2
HIDDEN = 32
Sent = tuple[str, int, int]
"""("open", epoch, positions), ("input", from, how many), ("cut", number, to)."""
ATTACKS: dict[str, list[Sent]] = {
    "a session longer than the table": [("open", 1, POSITIONS + 1), ("input", 0, POSITIONS + 1)],
    "a prompt longer than the table": [("open", 1, POSITIONS), ("input", 0, POSITIONS + 1)],
    "one position more": [("open", 1, POSITIONS), ("input", 0, POSITIONS), ("input", POSITIONS, 1)],
    "more than it asked for": [("open", 1, 40), ("input", 0, 40), ("input", 40, 30)],
    "an end beyond it, and a step before": [("open", 1, POSITIONS), ("input", 0, 60), ("input", 59, 9)],
    "a gap up to the end": [("open", 1, POSITIONS), ("input", 0, 4), ("input", POSITIONS - 1, 5)],
    "a position like no other": [("open", 1, POSITIONS), ("input", 1 << 30, 1)],
    "cut, and more than before": [("open", 1, POSITIONS), ("input", 0, 60), ("cut", 1, 59), ("input", 59, 6)],
    "cut to what is not held": [("open", 1, POSITIONS), ("input", 0, 60), ("cut", 1, 63), ("input", 63, 4)],
    "cut twice by one number": [
        ("open", 1, POSITIONS),
        ("input", 0, 60),
        ("cut", 1, 10),
        ("cut", 1, 50),
        ("input", 10, 55),
    ],
    "resumed as a longer one": [("open", 1, 60), ("input", 0, 60), ("open", 2, POSITIONS + 9), ("input", 60, 9)],
    "resumed as a shorter one": [("open", 1, POSITIONS), ("input", 0, 60), ("open", 2, 9), ("input", 60, 9)],
    "resumed, and the end sent again": [
        ("open", 1, POSITIONS),
        ("input", 0, 60),
        ("open", 2, POSITIONS),
        ("input", 0, POSITIONS + 1),
    ],
}


class Attacked:
    """One stage on a card, and a peer that sends it frames of its own. Made within a loop."""

    def __init__(self, span: ModelSpan) -> None:
        world, self.executor, ledger = FakeWorld(seed=3), InlineExecutor(), MemoryLedger()
        self.network, self.client = world.join(), world.join()
        self.runner = StageRunner(span, RunnerConfig(1 << 24, capture=False))
        self.worker = Worker(self.runner, self.executor)
        link = replace(link_config(), ledger=ledger)
        self.server = stage_server(ToyPeer(self.network, link), [Pipeline([self.worker], ledger)], ServerConfig())
        self.board = Switchboard(self.client, SESSION_PROTOCOL, HELLO, link_config())
        self.route = (HopSpec(self.network.peer_id, span.start, span.end),)

    async def start(self) -> None:
        await self.worker.start()
        await self.server.start()
        assert await self.client.connect(await self.network.addresses(), timeout_s=1)

    async def close(self) -> None:
        await self.server.close()
        await self.worker.close()
        await self.executor.close()

    def values(self, count: int) -> Tensor:
        """ids_BT, or hidden_BTH where the span begins behind the embedding."""
        if self.route[0].start == 0:
            return torch.arange(count)[None] % 99
        return torch.randn(1, count, HIDDEN, generator=torch.Generator().manual_seed(count))

    async def send(self, session: int, sent: list[Sent]) -> list[tuple[object, bytes]]:
        """What is heard of it, and what came with that."""
        heard: list[tuple[object, bytes]] = []

        def hear(frame: Frame, body: Body) -> None:
            heard.append((body, bytes(frame.payload)))

        def hear_last(error: Exception) -> None:
            heard.append((error, b""))

        channel: Channel | None = None
        for what, first, second in sent:
            if what == "open" or channel is None:
                channel = await self.board.call(self.network.peer_id, hear, hear_last)
                opened = Open(bytes([session] * 16), first, self.route, 0, Mode.DRIVEN, 1, second)
                channel.send(opened)
                outputs = await self.board.call(self.network.peer_id, hear, hear_last)
                outputs.send(Attach(opened.session, opened.epoch))
            elif what == "cut":
                channel.send(Truncate(first, second))
            else:
                info, payload = encode(self.values(second), Codec.NONE)
                channel.send(Input(info, want=Want.LAST), seq=first, payload=(payload,))
            await asyncio.sleep(0.1)
        channel.send(End())
        await asyncio.sleep(0.1)
        return heard


def logits(heard: list[tuple[object, bytes]]) -> Tensor:
    """Of each output, as they came."""
    return torch.stack(
        [torch.frombuffer(bytearray(sent), dtype=torch.float32) for body, sent in heard if isinstance(body, Output)]
    )


@pytest.mark.parametrize("start", [0, 2], ids=["from the first unit", "from the midst"])
@in_virtual_time
async def test_no_position_beyond_the_table_reaches_the_card(
    start: int, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    """The last places of the table are served, also beside each attack; a card that met another would compute nothing any more."""
    honest: list[Sent] = [("open", 1, POSITIONS), ("input", 0, POSITIONS - 1), ("input", POSITIONS - 1, 1)]
    stage = Attacked(load_span(checkpoints["gpt2"], start, UNITS, device=card))
    await stage.start()
    wanted = logits(await stage.send(0, honest))
    assert wanted.shape == (2, 99)
    for number, (name, sent) in enumerate(ATTACKS.items(), 1):
        heard, beside = await asyncio.gather(stage.send(2 * number, sent), stage.send(2 * number + 1, honest))
        assert any(isinstance(body, Error) for body, _ in heard), name
        torch.testing.assert_close(logits(beside), wanted, msg=name)
    assert float((torch.ones(3, device=card) * 2).sum()) == 6 and not stage.server.load
    await stage.close()
