"""One hop to scripted peers: what is journalled, what is replayed where, and which faults are told to whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from swarmnode.codec.body import VERSION, Body, HopSpec
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import End, Error, Fault, Hello, Input, Mode, Open, Output, Ready
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.errors import ErrorCode, PeerError, PeerLost, PeerRefused
from swarmnode.links.hop import OPENING, Entry, Hop
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.memory.medium import Path
from swarmnode.net.memory.network import FakeWorld
from tests.net.virtual import in_virtual_time

PROTOCOL = "/test/hop/1"
HELLO = Hello(VERSION, bytes(32), "test")

Answer = Callable[[Channel], None]


def ready(have: int) -> Answer:
    return lambda channel: channel.send(Ready(have))


def entry(start: int, count: int = 1) -> Entry:
    body = Input(TensorInfo(Codec.NONE, DType.INT64, (1, count)))
    return Entry(start, count, body, [bytes([start]) * 8 * count])


class Stage:
    """A peer that answers OPEN by a script and notes what it is sent."""

    def __init__(self, world: FakeWorld, answer: Answer) -> None:
        self.network = world.join()
        self.peer = self.network.peer_id
        self.answer = answer
        self.channels: list[Channel] = []
        self.opened: list[int] = []  # epochs
        self.inputs: list[tuple[int, int]] = []  # first position, bytes of the payload
        self.last_words: list[tuple[int, Body]] = []  # epochs opened by then
        self._switchboard = Switchboard(self.network, PROTOCOL, HELLO, LinkConfig(), accept=self._accept)

    async def start(self) -> None:
        await self._switchboard.start()

    def _accept(self, channel: Channel, frame: Frame, body: Body) -> None:
        if not isinstance(body, Open):
            return  # another conversation
        channel.on_frame = self._hear
        self.channels.append(channel)
        self.opened.append(body.epoch)
        self.answer(channel)

    def _hear(self, frame: Frame, body: Body) -> None:
        if isinstance(body, Input):
            self.inputs.append((frame.seq, len(frame.payload)))
        else:
            self.last_words.append((len(self.opened), body))


class Edge:
    """A hop, the world around it, and what it reported."""

    def __init__(self) -> None:
        self.world = FakeWorld(seed=5)
        self.world.default_path = Path(latency_s=0.01)
        self.network = self.world.join()
        self.frames: list[Body] = []
        self.faults: list[PeerError] = []
        self.switchboard = Switchboard(self.network, PROTOCOL, HELLO, LinkConfig())
        self.hop = Hop(self.switchboard, lambda _frame, body: self.frames.append(body), self.faults.append)

    async def stage(self, answer: Answer) -> Stage:
        stage = Stage(self.world, answer)
        await stage.start()
        assert await self.network.connect(await stage.network.addresses(), timeout_s=1)
        return stage

    async def open(self, stage: Stage, *, epoch: int = 0) -> None:
        body = Open(bytes(16), epoch, (HopSpec(stage.peer, 0, 1),), 0, Mode.DRIVEN, 1, 100)
        await self.hop.open(stage.peer, body)


async def settle() -> None:
    """Until everything that was sent has arrived."""
    await asyncio.sleep(0.1)


@in_virtual_time
async def test_what_came_before_the_hop_was_open_is_sent_first() -> None:
    edge = Edge()
    stage = await edge.stage(ready(0))
    edge.hop.send(entry(0, 4))
    edge.hop.send(entry(4))
    assert edge.hop.peer is None and "unbound waiting journal of 5 positions" in repr(edge.hop)
    await edge.open(stage)
    edge.hop.send(entry(5))
    await settle()
    assert stage.inputs == [(0, 32), (4, 8), (5, 8)]
    assert edge.hop.peer == stage.peer and "live journal of 6 positions" in repr(edge.hop)
    assert (edge.hop.end, edge.hop.journal_bytes) == (6, 48)


@in_virtual_time
async def test_positions_already_journalled_are_neither_kept_nor_sent_again() -> None:
    edge = Edge()
    stage = await edge.stage(ready(0))
    await edge.open(stage)
    edge.hop.send(entry(0, 2))
    edge.hop.send(entry(0, 2))
    edge.hop.send(entry(1))
    assert not edge.hop.record(entry(0))
    assert edge.hop.record(entry(2))  # the peer gets it in another way
    await settle()
    assert stage.inputs == [(0, 16)]
    assert (edge.hop.end, edge.hop.journal_bytes) == (3, 24)


@pytest.mark.parametrize(
    ("have", "replayed"),
    [(0, [0, 2, 3]), (1, [0, 2, 3]), (2, [2, 3]), (3, [3]), (4, [])],
)
def test_a_new_peer_gets_what_it_lacks_in_whole_entries(have: int, replayed: list[int]) -> None:
    @in_virtual_time
    async def test() -> None:
        edge = Edge()
        first, second = await edge.stage(ready(0)), await edge.stage(ready(have))
        await edge.open(first)
        for start, count in ((0, 2), (2, 1), (3, 1)):
            edge.hop.send(entry(start, count))
        edge.world.kill(first.peer)
        await settle()
        edge.hop.send(entry(4))  # while nobody is there to take it
        await edge.open(second, epoch=1)
        edge.hop.send(entry(5))
        await settle()
        assert [start for start, _ in second.inputs] == [*replayed, 4, 5]
        assert second.opened == [1]

    test()


@in_virtual_time
async def test_a_lost_peer_is_reported_once() -> None:
    edge = Edge()
    stage = await edge.stage(ready(0))
    await edge.open(stage)
    edge.world.kill(stage.peer)
    await settle()
    edge.hop.send(entry(0))
    edge.hop.send(entry(1))
    edge.hop.tell(Ready(0))
    await settle()
    assert [(type(fault), fault.peer) for fault in edge.faults] == [(PeerLost, stage.peer)]
    assert edge.hop.end == 2  # journalled for whoever comes next


@in_virtual_time
async def test_a_peer_that_hangs_is_reported() -> None:
    edge = Edge()
    stage = await edge.stage(ready(0))
    await edge.open(stage)
    edge.world.hang(stage.peer)
    edge.hop.send(entry(0))
    await asyncio.sleep(LinkConfig().heartbeat.max_silence_s)
    assert [type(fault) for fault in edge.faults] == [PeerLost]


@pytest.mark.parametrize(("last", "kind"), [(Error(ErrorCode.BUSY, 1.5), PeerRefused), (End(), PeerLost)])
def test_a_session_that_the_peer_ends_is_a_fault(last: Body, kind: type[PeerError]) -> None:
    @in_virtual_time
    async def test() -> None:
        edge = Edge()
        stage = await edge.stage(ready(0))
        await edge.open(stage)
        stage.channels[0].close(last)
        await settle()
        assert [(type(fault), fault.peer) for fault in edge.faults] == [(kind, stage.peer)]

    test()


@in_virtual_time
async def test_an_error_while_opening_is_raised_and_not_reported() -> None:
    edge = Edge()
    busy = await edge.stage(lambda channel: channel.close(Error(ErrorCode.BUSY, 2.0)))
    edge.hop.send(entry(0))
    with pytest.raises(PeerRefused) as refused:
        await edge.open(busy)
    assert (refused.value.code, refused.value.retry_s, refused.value.peer) == (ErrorCode.BUSY, 2.0, busy.peer)
    assert edge.faults == [] and edge.hop.peer is None
    good = await edge.stage(ready(0))
    await edge.open(good, epoch=1)
    await settle()
    assert good.inputs == [(0, 8)]


@pytest.mark.parametrize("last", [Error(ErrorCode.BUSY), End()], ids=["error", "end"])
@pytest.mark.parametrize("journalled", [0, 1])
def test_an_error_together_with_ready_is_raised(last: Body, journalled: int) -> None:
    @in_virtual_time
    async def test() -> None:
        def answer(channel: Channel) -> None:
            channel.send(Ready(0))
            channel.close(last)

        edge = Edge()
        stage = await edge.stage(answer)
        for start in range(journalled):
            edge.hop.send(entry(start))
        with pytest.raises(PeerError):
            await edge.open(stage)
        assert edge.faults == [] and edge.hop.peer is None

    test()


@in_virtual_time
async def test_a_peer_that_answers_pings_but_does_not_get_ready_costs_the_deadline() -> None:
    edge = Edge()
    silent = await edge.stage(lambda _channel: None)
    started_s = asyncio.get_running_loop().time()
    with pytest.raises(PeerLost, match=r"did not get ready within 2\.0 s"):
        await edge.open(silent)
    assert asyncio.get_running_loop().time() - started_s == pytest.approx(OPENING.floor_s, abs=0.1)
    assert edge.hop.peer is None


@in_virtual_time
async def test_ready_may_come_late_behind_a_payload() -> None:
    edge = Edge()
    late = await edge.stage(lambda _channel: None)
    edge.world.set_path(edge.network.peer_id, late.peer, Path(latency_s=0.01, bytes_per_s=1e6))
    other = await edge.switchboard.call(late.peer, lambda _frame, _body: None, lambda _error: None)
    other.send(Input(TensorInfo(Codec.NONE, DType.INT64, (1, 1))), payload=[bytes(4_000_000)])
    late.answer = ready(0)
    opening = asyncio.ensure_future(edge.open(late))
    assert await asyncio.wait_for(opening, 8.0) is None and edge.hop.peer == late.peer


@in_virtual_time
async def test_an_epoch_that_overtakes_another_voids_it() -> None:
    edge = Edge()
    silent, good = await edge.stage(lambda _channel: None), await edge.stage(ready(0))
    edge.hop.send(entry(0))
    first = asyncio.ensure_future(edge.open(silent))
    await settle()
    await edge.open(good, epoch=1)
    with pytest.raises(PeerLost, match="has moved on"):
        await first
    silent.channels[0].send(Output(ids=(7,)), seq=1)  # of an older epoch
    await settle()
    assert good.inputs == [(0, 8)] and silent.inputs == []
    assert edge.frames == [] and edge.faults == [] and edge.hop.peer == good.peer


@in_virtual_time
async def test_frames_of_the_session_are_passed_on_until_it_is_left() -> None:
    edge = Edge()
    stage = await edge.stage(ready(0))
    await edge.open(stage)
    fault = Fault(0, 1, ErrorCode.PEER_LOST)
    stage.channels[0].send(fault)
    await settle()
    edge.hop.unbind()
    stage.channels[0].send(Output(ids=(7,)), seq=1)
    await settle()
    assert edge.frames == [fault]
    assert not stage.channels[0].open  # it was told END
    assert edge.faults == []


@in_virtual_time
async def test_a_peer_that_stays_hears_of_the_new_epoch_before_the_old_one_ends() -> None:
    edge = Edge()
    stays = await edge.stage(ready(0))
    await edge.open(stays)
    edge.hop.send(entry(0, 2))
    await settle()
    stays.answer = ready(2)
    await edge.open(stays, epoch=1)
    edge.hop.send(entry(2))
    await settle()
    assert stays.opened == [0, 1]
    assert stays.last_words == [(2, End())]  # an END that came first would have freed the cache
    assert stays.inputs == [(0, 16), (2, 8)]
    assert edge.faults == []


@in_virtual_time
async def test_a_peer_that_is_left_is_told() -> None:
    edge = Edge()
    left, next_one = await edge.stage(ready(0)), await edge.stage(ready(0))
    await edge.open(left)
    await edge.open(next_one, epoch=1)
    await settle()
    assert left.last_words == [(1, End())] and next_one.last_words == []
    edge.hop.unbind()
    await settle()
    assert next_one.last_words == [(1, End())]


def states(start: int, count: int, codec: Codec = Codec.NONE, *, of: int | None = None) -> Entry:
    """Hidden states of width 2, of which `count` count."""
    body = Input(TensorInfo(codec, DType.FLOAT32, (1, of or count, 2), 2 if codec == Codec.INT8 else 0))
    return Entry(start, count, body, [bytes(8 * (of or count))])


@pytest.mark.parametrize(
    ("source", "end", "begun"),
    [
        ([states(0, 4), states(4, 4)], 8, [(0, 4), (4, 4)]),
        ([states(0, 4), states(4, 4)], 6, [(0, 4), (4, 2)]),
        ([states(0, 4), states(4, 4)], 4, [(0, 4)]),
        ([states(0, 4), states(4, 4)], 99, [(0, 4), (4, 4)]),
        ([states(0, 4), states(4, 4, Codec.INT8)], 6, [(0, 4)]),  # has one scale, and is to be had whole
        ([states(0, 4, Codec.INT8)], 3, []),
        ([states(0, 4), states(4, 2, Codec.INT8, of=4), states(6, 2)], 8, [(0, 4)]),  # was cut: what follows it says so
    ],
)
@in_virtual_time
async def test_another_session_begins_with_whole_pieces(
    source: list[Entry], end: int, begun: list[tuple[int, int]]
) -> None:
    one, other = Edge().hop, Edge().hop
    for each in source:
        one.record(each)
    assert other.begin_as(one, end) == other.end == sum(count for _, count in begun)
    assert [(each.start, each.count) for each in other.journal] == begun
    assert all(each.count == each.body.tensor.shape[1] for each in other.journal)
    assert one.end == source[-1].end, "the source stays as it is"
