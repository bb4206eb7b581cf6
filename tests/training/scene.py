"""A training stage of the toy model, alone, and two peers who speak to it, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from swarmnode.checkpoints.checkpoint_manager import CheckpointManager
from swarmnode.checkpoints.state_exchange import StateServer
from swarmnode.codec.body import Body, HopSpec
from swarmnode.codec.frames import Frame
from swarmnode.codec.training_messages import Begin, Condition, Forward, Labels, Lead, Status
from swarmnode.compress.codecs import encode_values
from swarmnode.compute.executor import WorkItem
from swarmnode.errors import PeerError
from swarmnode.ledger import MemoryLedger
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.memory.network import FakeWorld
from swarmnode.peer.findings_record import Findings
from swarmnode.plan.audits import AuditBudget
from swarmnode.swarm.records.run import encode_run
from swarmnode.training.spot_checks.spot_checks import SpotChecks
from swarmnode.training.spot_checks.step_records import Committer
from swarmnode.training.worker.activation_compressor import ActivationCompressor
from swarmnode.training.worker.admission import seal_lease
from swarmnode.training.worker.training_stage import TRAIN_PROTOCOL, TrainingStage
from tests.compute.inline_executor import InlineExecutor
from tests.compute.training.toy import ToySegment, toy_values
from tests.net.virtual import in_virtual_time_with
from tests.peer.toy_peer import ToyPeer
from tests.peer.training_swarm import HELLO, PATIENCE_S, is_signed_by, one_part, sign_as, toy_batches, toy_run

TERM = 5
KEY = bytes(range(32))
RUN = toy_run(toy_batches(), 12)


class Talk:
    """One side of a conversation: what came, in order."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self._heard: asyncio.Queue[Body | PeerError] = asyncio.Queue()

    @classmethod
    async def begin(cls, board: Switchboard, peer: str) -> Talk:
        talk = cls()
        talk.channel = await board.call(peer, talk._hear, talk._heard.put_nowait)
        return talk

    def _hear(self, _frame: Frame, body: Body) -> None:
        self._heard.put_nowait(body)

    def send(self, body: Body, payload: object = ()) -> None:
        assert self.channel is not None
        self.channel.send(body, payload=payload)  # type: ignore[arg-type]

    async def next(self) -> Body | PeerError:
        return await asyncio.wait_for(self._heard.get(), PATIENCE_S)

    async def ask(self, body: Body, payload: object = ()) -> Body | PeerError:
        self.send(body, payload)
        return await self.next()


class Scene:
    """A stage that holds the whole toy model, and two peers who speak to it."""

    def __init__(self, folder: Path) -> None:
        world = FakeWorld(seed=1)
        self.networks = [world.join() for _ in range(3)]
        peer = ToyPeer(self.networks[0], LinkConfig(), HELLO)
        self.states = StateServer(peer)
        checkpoint_manager = CheckpointManager(peer, folder, self.states)
        self.checkpoint_manager = checkpoint_manager
        self.computed: list[str] = []  # what the executor was told of what it runs
        self.executor = InlineExecutor(self._note)
        committer = Committer(self.networks[0].peer_id, HELLO.swarm, sign_as(self.networks[0].peer_id), is_signed_by)
        standing = Findings(folder / "standing.json", asyncio.get_running_loop().time)
        checks = SpotChecks(peer, committer, self.executor, standing, MemoryLedger(), budget=AuditBudget(0))
        parts = one_part(ToySegment(), self.executor)
        self.stage = TrainingStage(
            peer, parts, checkpoint_manager, compressor=ActivationCompressor("none", ()), spot_checks=checks
        )
        self.stage.state.has_new_speed = lambda: False  # type: ignore[method-assign]  # what is told unasked comes between
        self.boards = [Switchboard(network, TRAIN_PROTOCOL, HELLO, LinkConfig()) for network in self.networks[1:]]
        self.peer = self.networks[0].peer_id

    async def __aenter__(self) -> Scene:
        await self.states.serve()
        await self.stage.start()
        for network in self.networks[1:]:
            await network.connect(await self.networks[0].addresses(), timeout_s=1)
        return self

    def _note(self, item: WorkItem) -> float:
        self.computed.append(repr(item))
        return 0.0

    async def talk(self, board: int = 0) -> Talk:
        return await Talk.begin(self.boards[board], self.peer)

    async def lead(self) -> Talk:
        """A coordinator whose run has begun."""
        line = await self.talk()
        assert isinstance(await line.ask(Lead(TERM, KEY)), Status)
        status = await line.ask(Begin(encode_run(RUN)))
        assert isinstance(status, Status) and status.condition == Condition.READY
        return line

    async def feed(self, number: int, lease: int = 1, **changes: int) -> Body | PeerError:
        """One microbatch, its labels first; what the stage answers."""
        (await self.talk(1)).send(*self.labels(number, lease, **changes))
        body, payload = self.forward(number, lease, **changes)
        return await (await self.talk(1)).ask(body, payload)

    def forward(self, number: int, lease: int = 1, *, term: int = TERM, step: int = 0, **place: int) -> Any:
        """The first frame of a microbatch of a lease that the second peer holds, and its payload."""
        infos, payload = encode_values(toy_values(number, 4).inputs)
        route = (HopSpec(self.peer, place.get("start", 0), place.get("end", 3)),)
        feeder = self.networks[2].peer_id
        seal = seal_lease(KEY, RUN.id, term, lease, step, number, route, feeder)
        return Forward(term, lease, step, number, route, 0, infos, RUN.id, feeder, 0.0, seal), payload

    def labels(self, number: int, lease: int = 1, **changes: int) -> Any:
        """What goes with it to the last hop, and its payload."""
        body, _ = self.forward(number, lease, **changes)
        infos, payload = encode_values(toy_values(number, 4).labels)
        given = (
            body.term,
            body.lease,
            body.step,
            body.number,
            body.route,
            infos,
            body.run,
            body.feeder,
            0.0,
            body.seal,
        )
        return Labels(*given), payload

    async def __aexit__(self, *_: object) -> None:
        for board in self.boards:
            await board.close()
        await self.stage.close()
        await self.executor.close()
        await self.checkpoint_manager.close()
        await self.states.close()
        for network in self.networks:
            await network.close()


in_scene = in_virtual_time_with(Scene)
