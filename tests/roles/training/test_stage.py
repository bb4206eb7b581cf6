"""A stage alone: what it does for whom, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, End, Error, Fault, HopSpec
from swarmnode.codec.training_messages import (
    Backward,
    Begin,
    Commit,
    Condition,
    Conduct,
    Counted,
    Discard,
    Forward,
    Group,
    MemberSpec,
    Reduce,
    Reduced,
    Release,
    Status,
)
from swarmnode.errors import ErrorCode, PeerError
from swarmnode.net.fake import FakeWorld
from swarmnode.net.link import LinkConfig
from swarmnode.net.switchboard import Channel, Switchboard
from swarmnode.roles.training.keeper import Keeper
from swarmnode.roles.training.stage import TRAIN_PROTOCOL, TrainingStage
from swarmnode.roles.training.values import encode_values
from swarmnode.swarm.run import encode_run
from tests.compute.training.toy import ToySegment, toy_values
from tests.roles.training_swarm import HELLO, toy_batches, toy_run

TERM = 5
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
        return await asyncio.wait_for(self._heard.get(), 5)

    async def ask(self, body: Body, payload: object = ()) -> Body | PeerError:
        self.send(body, payload)
        return await self.next()


class Scene:
    """A stage that holds the whole toy model, and two peers who speak to it."""

    def __init__(self, folder: Path) -> None:
        world = FakeWorld(seed=1)
        self.networks = [world.join() for _ in range(3)]
        keeper = Keeper(self.networks[0], HELLO, LinkConfig(), folder)
        self.keeper = keeper
        self.stage = TrainingStage(self.networks[0], HELLO, LinkConfig(), ToySegment(), keeper)
        self.boards = [Switchboard(network, TRAIN_PROTOCOL, HELLO, LinkConfig()) for network in self.networks[1:]]
        self.peer = self.networks[0].peer_id

    async def start(self) -> None:
        await self.stage.start()
        for network in self.networks[1:]:
            await network.connect(await self.networks[0].addresses(), timeout_s=1)

    async def talk(self, board: int = 0) -> Talk:
        return await Talk.begin(self.boards[board], self.peer)

    async def conduct(self) -> Talk:
        """A conductor whose run has begun."""
        line = await self.talk()
        assert isinstance(await line.ask(Conduct(TERM)), Status)
        status = await line.ask(Begin(encode_run(RUN)))
        assert isinstance(status, Status) and status.condition == Condition.READY
        return line

    async def feed(self, number: int, lease: int = 1, **changes: int) -> Body | PeerError:
        """One microbatch; what the stage answers."""
        start, end = changes.pop("start", 0), changes.pop("end", 3)
        infos, payload = encode_values(toy_values(number, 4))
        fields = {"term": TERM, "step": 0, **changes}
        route = (HopSpec(self.peer, start, end),)
        body = Forward(fields["term"], lease, fields["step"], number, route, 0, infos)
        return await (await self.talk(1)).ask(body, payload)

    async def close(self) -> None:
        for board in self.boards:
            await board.close()
        await self.stage.close()
        await self.keeper.close()
        for network in self.networks:
            await network.close()


@pytest_asyncio.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path)
    await scene.start()
    yield scene
    await scene.close()


def masks(status: Body | PeerError) -> tuple[Counted, ...]:
    assert isinstance(status, Status)
    return status.counted


async def test_a_microbatch_is_counted_and_told(scene: Scene) -> None:
    line = await scene.conduct()
    answer = await scene.feed(2)
    assert isinstance(answer, Backward) and answer.present == (False, False) and answer.loss > 0
    assert masks(await line.ask(Release(()))) == (Counted(0, 3, b"\x04"),)
    assert masks(await line.ask(Discard())) == ()


async def test_the_same_microbatch_is_counted_once(scene: Scene) -> None:
    line = await scene.conduct()
    first, second = await scene.feed(2), await scene.feed(2, lease=2)
    assert isinstance(first, Backward) and isinstance(second, Backward) and first.loss == second.loss
    assert masks(await line.ask(Release(()))) == (Counted(0, 3, b"\x04"),)


async def test_a_released_lease_that_comes_late_is_not_counted(scene: Scene) -> None:
    line = await scene.conduct()
    assert masks(await line.ask(Release((1,)))) == ()
    assert await scene.feed(2, lease=1) == Fault(0, 0, ErrorCode.STALE)
    assert isinstance(await scene.feed(2, lease=2), Backward)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"term": TERM - 1}, ErrorCode.STALE),
        ({"term": TERM + 1}, ErrorCode.STALE),
        ({"step": 2}, ErrorCode.STALE),
        ({"end": 4}, ErrorCode.WRONG_SPAN),
    ],
)
async def test_what_is_not_of_now_and_here_is_refused(scene: Scene, changes: dict[str, int], code: ErrorCode) -> None:
    await scene.conduct()
    assert await scene.feed(0, **changes) == Fault(0, 0, code)


async def test_nothing_is_computed_before_a_run_has_begun(scene: Scene) -> None:
    assert await scene.feed(0, term=0) == Fault(0, 0, ErrorCode.STALE)


async def test_values_that_do_not_fit_are_the_senders_fault(scene: Scene) -> None:
    line = await scene.conduct()
    infos, payload = encode_values(toy_values(0))
    body = Forward(TERM, 1, 0, 0, (HopSpec(scene.peer, 0, 3),), 0, infos)
    answer = await (await scene.talk(1)).ask(body, payload[:1])
    assert answer == Fault(0, 0, ErrorCode.MALFORMED)
    assert masks(await line.ask(Release(()))) == ()


async def test_a_lower_term_is_told_which_one_is_in_force(scene: Scene) -> None:
    line = await scene.conduct()
    rival = await scene.talk(1)
    status = await rival.ask(Conduct(TERM - 1))
    assert isinstance(status, Status) and status.term == TERM
    assert await rival.ask(Discard()) == Error(ErrorCode.STALE)
    assert isinstance(await line.ask(Release(())), Status), "the first conductor's word still counts"


async def test_a_higher_term_takes_over_and_finds_what_is_counted(scene: Scene) -> None:
    line = await scene.conduct()
    await scene.feed(3)
    rival = await scene.talk(1)
    status = await rival.ask(Conduct(TERM + 1))
    assert masks(status) == (Counted(0, 3, b"\x08"),)
    assert await line.ask(Discard()) == Error(ErrorCode.STALE)
    assert await scene.feed(4, term=TERM) == Fault(0, 0, ErrorCode.STALE)
    assert isinstance(await scene.feed(4, term=TERM + 1), Backward)


async def test_a_commit_without_a_reduction_changes_nothing(scene: Scene) -> None:
    line = await scene.conduct()
    await scene.feed(3)
    status = await line.ask(Commit(0, 1.0))
    assert masks(status) == (Counted(0, 3, b"\x08"),)
    assert scene.stage.step == 0


async def test_a_microbatch_of_the_next_step_waits_for_the_commit(scene: Scene) -> None:
    line = await scene.conduct()
    for number in range(RUN.microbatches):
        assert isinstance(await scene.feed(number, lease=number), Backward)
    early = asyncio.ensure_future(scene.feed(0, lease=99, step=1))
    group = Group(0, (0, 1, 2), (MemberSpec(scene.peer, RUN.microbatches),))
    reduced = await line.ask(Reduce(0, 0, (group,)))
    assert isinstance(reduced, Reduced) and len(reduced.squares) == 1
    assert not early.done()
    status = await line.ask(Commit(0, reduced.squares[0] ** 0.5))
    assert isinstance(status, Status) and status.step == 1
    assert isinstance(await early, Backward)


async def test_a_first_frame_that_begins_nothing(scene: Scene) -> None:
    assert await (await scene.talk()).ask(Release(())) == Error(ErrorCode.MALFORMED)
    assert await (await scene.talk()).ask(End()) == Error(ErrorCode.MALFORMED)
