from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from swarmnode.codec.body import VERSION, Body
from swarmnode.codec.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, Frame, FrameKind, FrameReader, pack_header
from swarmnode.codec.messages import Chunk, End, Error, Hello, Output, Ready, encode_body
from swarmnode.errors import ErrorCode, PeerError, PeerLost, PeerRefused, ProtocolError
from swarmnode.links.link import Link, OnFrame
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.link_statistics import LinkStatistics
from swarmnode.net.fair_share import FairPace, Pace
from swarmnode.net.interfaces import Buffer, Stream
from swarmnode.net.memory.medium import Path
from swarmnode.net.memory.network import FakeWorld
from swarmnode.net.memory.virtual_time import VirtualLoop
from tests.net.virtual import in_virtual_time

SWARM = bytes(range(32))
HELLO = Hello(VERSION, SWARM, "test/1")
PROTOCOL = "/test/link/1"


def now_s() -> float:
    return asyncio.get_running_loop().time()


CONFIG = LinkConfig(clock=now_s)
HEARTBEAT = CONFIG.heartbeat
MEBIBYTE = 1 << 20


def nothing(_frame: Frame, _body: Body) -> None:
    pass


class Pair:
    """Two peers with a link between them; `there` is the side that accepted."""

    def __init__(self, path: Path = Path(), config: LinkConfig = CONFIG) -> None:
        self.world = FakeWorld(seed=3)
        self.world.default_path = path
        self.alice, self.bob = self.world.join(), self.world.join()
        self.config = replace(config, link_statistics=LinkStatistics())  # of what other tests measured nothing is known
        self.there: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        self.there_ended: asyncio.Future[PeerError | None] = asyncio.get_running_loop().create_future()

    async def open(self, on_frame_there: OnFrame = nothing, hello_there: Hello = HELLO) -> Link:
        """Alice's end, greeted; Bob's runs."""
        await self.serve(on_frame_there, hello_there)
        return await Link.connect(self.alice, self.bob.peer_id, PROTOCOL, HELLO, config=self.config)

    async def serve(self, on_frame: OnFrame = nothing, hello: Hello = HELLO) -> None:
        async def answer(stream: Stream) -> None:
            try:
                link = await Link.accept(stream, hello, config=self.config)
                self.there.set_result(link)
                await link.run(on_frame)
                self.there_ended.set_result(None)
            except PeerError as error:
                self.there_ended.set_result(error)

        await self.bob.serve(PROTOCOL, answer)
        assert await self.alice.connect(await self.bob.addresses(), timeout_s=10)

    async def raw(self) -> Stream:
        """A bare stream from Alice to Bob."""
        return await self.alice.open(self.bob.peer_id, PROTOCOL, timeout_s=1)


def frame(body: Body, kind: FrameKind, *, channel: int = 0, seq: int = 0, payload: bytes = b"") -> bytes:
    data = encode_body(body)
    return pack_header(kind, len(data), len(payload), channel, seq) + data + payload


async def all_frames(stream: Stream) -> list[Frame]:
    reader, frames = FrameReader(), []
    while data := await stream.read():
        frames += reader.feed(data)
    assert reader.pending_bytes == 0
    return frames


class Recorder:
    """Writes of a stream, as they leave."""

    def __init__(self, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes: list[int] = []
        write: Callable[[Sequence[Buffer]], None] = link._stream.write

        def record(buffers: Sequence[Buffer]) -> None:
            self.writes.append(sum(len(buffer) for buffer in buffers))
            write(buffers)

        monkeypatch.setattr(link._stream, "write", record)


# -- greeting


@in_virtual_time
async def test_frames_of_a_turn_leave_in_one_write_and_with_the_one_that_is_to_leave_at_once() -> None:
    heard: list[int] = []
    pair = Pair()
    link = await pair.open(lambda frame, _body: heard.append(frame.seq))
    writes: list[int] = []
    write = link._stream.write

    def counted(buffers: Sequence[Buffer]) -> None:
        writes.append(len(buffers))
        write(buffers)

    link._stream.write = counted  # type: ignore[method-assign]
    for seq in (1, 2):
        link.send(Ready(0), channel=1, seq=seq)
    assert writes == []
    link.send(Ready(0), channel=1, seq=3, at_once=True)
    assert writes == [3]
    link.send(Ready(0), channel=1, seq=4)
    link.send(Ready(0), channel=1, seq=5)
    await link.drain()
    assert writes == [3, 2]
    await link.close()
    assert await pair.there_ended is None and heard == [1, 2, 3, 4, 5]


@in_virtual_time
async def test_frames_go_both_ways_in_order() -> None:
    pair = Pair(Path(latency_s=0.01))
    got: list[tuple[int, int, Body, bytes]] = []
    large = bytes(range(256)) * 8192  # 2 MiB
    echo = asyncio.get_running_loop().create_future()

    def on_frame_there(frame: Frame, body: Body) -> None:
        got.append((frame.channel, frame.seq, body, bytes(frame.payload)))
        if isinstance(body, Output):
            pair.there.result().send(Ready(7), channel=9)

    link = await pair.open(on_frame_there)
    running = asyncio.ensure_future(link.run(lambda _frame, body: echo.set_result(body)))
    link.send(Chunk(), channel=1, seq=2, payload=[large[:100], large[100:]])
    link.send(Chunk(hashes=True), channel=3, seq=0xFFFFFFFF, payload=[b""])
    link.send(Output(ids=(5,)), channel=4)
    await link.drain()
    assert await echo == Ready(7)
    assert got == [
        (1, 2, Chunk(), large),
        (3, 0xFFFFFFFF, Chunk(hashes=True), b""),
        (4, 0, Output(ids=(5,)), b""),
    ]
    await link.close()
    assert await pair.there_ended is None
    await running


@in_virtual_time
@pytest.mark.parametrize(
    ("ours", "code"),
    [
        (Hello(VERSION, bytes(32)), ErrorCode.WRONG_SWARM),
        (Hello(VERSION + 1, SWARM), ErrorCode.VERSION),
        (Hello(VERSION + 1, SWARM, newest=VERSION + 2), ErrorCode.VERSION),
    ],
)
async def test_strangers_get_a_refusal_and_nothing_more(ours: Hello, code: ErrorCode) -> None:
    pair = Pair()
    await pair.serve()
    stream = await pair.raw()
    stream.write([frame(ours, FrameKind.HELLO)])
    answers = await all_frames(stream)
    assert [(answer.kind, answer.channel, answer.body) for answer in answers] == [
        (FrameKind.ERROR, 0, encode_body(Error(code)))
    ]
    error = await pair.there_ended
    assert isinstance(error, ProtocolError) and error.code == code
    with pytest.raises(PeerRefused) as refused:
        await Link.connect(pair.alice, pair.bob.peer_id, PROTOCOL, ours, config=CONFIG)
    assert refused.value.code == code and refused.value.peer == pair.bob.peer_id


@in_virtual_time
async def test_the_opener_checks_the_answer_too() -> None:
    pair = Pair()
    answer = frame(Hello(VERSION, bytes(32)), FrameKind.HELLO)

    async def liar(stream: Stream) -> None:
        stream.write([answer])
        await stream.read()

    await pair.bob.serve(PROTOCOL, liar)
    await pair.alice.connect(await pair.bob.addresses(), timeout_s=1)
    with pytest.raises(ProtocolError) as refused:
        await Link.connect(pair.alice, pair.bob.peer_id, PROTOCOL, HELLO, config=CONFIG)
    assert refused.value.code == ErrorCode.WRONG_SWARM


@in_virtual_time
async def test_who_does_not_greet_is_not_waited_for() -> None:
    pair = Pair()
    await pair.serve()
    stream = await pair.raw()
    started_s = now_s()
    error = await pair.there_ended
    assert isinstance(error, PeerLost) and "did not greet in time" in str(error)
    assert now_s() - started_s == pytest.approx(CONFIG.connecting.ceiling_s)
    stream.abort()


@in_virtual_time
async def test_a_stream_that_opened_at_once_is_not_waited_for_as_one_that_is_far_away() -> None:
    pair = Pair(Path(latency_s=0.01))

    async def hang(stream: Stream) -> None:
        await asyncio.sleep(60)

    await pair.bob.serve(PROTOCOL, hang)
    await pair.alice.connect(await pair.bob.addresses(), timeout_s=1)
    started_s = now_s()
    with pytest.raises(PeerLost, match="did not greet in time"):
        await Link.connect(pair.alice, pair.bob.peer_id, PROTOCOL, HELLO, config=pair.config)
    assert now_s() - started_s == pytest.approx(CONFIG.connecting.floor_s, abs=0.1)


@in_virtual_time
@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(End(), FrameKind.END), ErrorCode.MALFORMED),
        (b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", ErrorCode.TOO_LARGE),
        (pack_header(FrameKind.HELLO, 3, 0) + b"\xff\xff\xff", ErrorCode.MALFORMED),
        (pack_header(FrameKind.HELLO, 60, MAX_PAYLOAD_BYTES), ErrorCode.TOO_LARGE),
        (pack_header(FrameKind.HELLO, 0xFFFF, 0), ErrorCode.TOO_LARGE),
    ],
)
async def test_who_does_not_speak_the_protocol_is_told(sent: bytes, code: ErrorCode) -> None:
    pair = Pair()
    await pair.serve()
    stream = await pair.raw()
    stream.write([sent])
    (answer,) = await all_frames(stream)
    assert (answer.kind, answer.body) == (FrameKind.ERROR, encode_body(Error(code)))


# -- frames


@in_virtual_time
async def test_frames_of_one_turn_leave_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    link = await Pair().open()
    recorder = Recorder(link, monkeypatch)
    for seq in range(5):
        link.send(Chunk(), channel=1, seq=seq, payload=[b"x" * 10])
    assert recorder.writes == []
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(recorder.writes) == 1
    assert recorder.writes[0] == link.sent_bytes - len(frame(HELLO, FrameKind.HELLO))


@in_virtual_time
async def test_a_decode_step_costs_few_bytes_and_no_pings() -> None:
    pair = Pair(Path(latency_s=0.02))
    left = 200
    link = await pair.open(lambda _frame, _body: pair.there.result().send(Output(ids=(31999,)), channel=1))
    link.busy = True
    done = asyncio.Event()

    def next_step(_frame: Frame, _body: Body) -> None:
        nonlocal left
        left -= 1
        done.set() if left == 0 else link.send(Chunk(), channel=1, payload=[bytes(2048)])

    running = asyncio.ensure_future(link.run(next_step))
    before = link.sent_bytes + link.received_bytes
    link.send(Chunk(), channel=1, payload=[bytes(2048)])
    await done.wait()
    per_step = (link.sent_bytes + link.received_bytes - before) / 200
    assert per_step <= 2048 + 2 * HEADER_BYTES + 16
    running.cancel()


@in_virtual_time
async def test_kinds_of_newer_versions_are_skipped() -> None:
    pair = Pair()
    got: list[Body] = []
    await pair.serve(lambda _frame, body: got.append(body))
    stream = await pair.raw()
    unknown = pack_header(99, 3, 5, 1, 1) + b"???12345"
    stream.write([frame(HELLO, FrameKind.HELLO) + unknown + frame(Ready(3), FrameKind.READY, channel=1)])
    stream.write([unknown + frame(End(), FrameKind.END)])
    assert await pair.there_ended is None
    assert got == [Ready(3)]


@in_virtual_time
@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (pack_header(FrameKind.CHUNK, 0, 1001, 1, 0), ErrorCode.TOO_LARGE),
        (pack_header(FrameKind.READY, 2, 0, 1, 0) + b"\xc1\xc1", ErrorCode.MALFORMED),
        (frame(Ready(1), FrameKind.READY), ErrorCode.MALFORMED),  # on channel 0
        (frame(HELLO, FrameKind.HELLO), ErrorCode.MALFORMED),  # again
    ],
)
async def test_bad_frames_end_the_link_on_both_sides(sent: bytes, code: ErrorCode) -> None:
    pair = Pair(config=replace(CONFIG, max_payload_bytes=1000))
    link = await pair.open()
    link._stream.write([sent])
    with pytest.raises(PeerRefused) as refused:
        await link.run(nothing)
    assert refused.value.code == code
    error = await pair.there_ended
    assert isinstance(error, ProtocolError) and error.code == code and error.peer == pair.alice.peer_id


@in_virtual_time
async def test_what_the_owner_finds_wrong_is_told() -> None:
    def picky(_frame: Frame, _body: Body) -> None:
        raise ProtocolError("not like this", code=ErrorCode.STALE)

    pair = Pair()
    link = await pair.open(picky)
    link.send(Ready(1), channel=1)
    with pytest.raises(PeerRefused) as refused:
        await link.run(nothing)
    assert refused.value.code == ErrorCode.STALE


@in_virtual_time
async def test_a_bug_of_the_owner_ends_the_link() -> None:
    def buggy(_frame: Frame, _body: Body) -> None:
        raise ZeroDivisionError

    pair = Pair()
    link = await pair.open(lambda _frame, _body: pair.there.result().send(Ready(1), channel=1))
    link.send(Ready(1), channel=1)
    with pytest.raises(ZeroDivisionError):
        await link.run(buggy)
    assert link.closed
    assert isinstance(await pair.there_ended, PeerLost)


# -- the end


@in_virtual_time
async def test_a_stream_that_ends_without_end_was_cut() -> None:
    pair = Pair()
    link = await pair.open()
    running = asyncio.ensure_future(link.run(nothing))
    link.abort()
    error = await pair.there_ended
    assert isinstance(error, PeerLost) and "cut the link" in str(error)
    with pytest.raises(PeerLost):
        await running
    with pytest.raises(PeerLost):
        link.send(Ready(1), channel=1)
    await link.close()


@in_virtual_time
async def test_a_killed_peer_is_lost_at_once() -> None:
    pair = Pair(Path(latency_s=0.01))
    link = await pair.open()
    running = asyncio.ensure_future(link.run(nothing))
    await asyncio.sleep(1)
    pair.world.kill(pair.bob.peer_id)
    killed_s = now_s()
    with pytest.raises(PeerLost):
        await running
    assert now_s() - killed_s == pytest.approx(0.01)
    with pytest.raises(PeerLost):
        await link.drain()


@in_virtual_time
async def test_close_is_quiet_and_safe_to_repeat() -> None:
    pair = Pair()
    link = await pair.open()
    running = asyncio.ensure_future(link.run(nothing))
    link.send(Ready(1), channel=1)
    await link.close()
    await link.close()
    assert await pair.there_ended is None
    await running
    assert repr(link).startswith(f"<Link to {pair.bob.peer_id} closed rtt ")


# -- heartbeat


async def run_until_lost(link: Link) -> float:
    """Seconds until the link was given up for silence."""
    started_s = now_s()
    with pytest.raises(PeerLost, match="hangs: silent for"):
        await link.run(nothing)
    return now_s() - started_s


@in_virtual_time
async def test_a_hanging_peer_is_found_soon_where_answers_are_expected() -> None:
    pair = Pair(Path(latency_s=0.01))
    link = await pair.open()
    link.busy = True
    pair.world.hang(pair.bob.peer_id)
    assert HEARTBEAT.min_silence_s <= await run_until_lost(link) <= 2.0


@in_virtual_time
async def test_a_hanging_peer_is_found_slowly_where_nothing_is_expected() -> None:
    pair = Pair(Path(latency_s=0.01))
    link = await pair.open()
    pair.world.hang(pair.bob.peer_id)
    assert 10.0 <= await run_until_lost(link) <= 15.0


@in_virtual_time
async def test_silence_counts_from_when_something_is_expected() -> None:
    pair = Pair(Path(latency_s=0.01))
    link = await pair.open()
    running = asyncio.ensure_future(run_until_lost(link))
    await asyncio.sleep(8)
    pair.world.hang(pair.bob.peer_id)
    link.busy = True
    assert 8 + HEARTBEAT.min_silence_s <= await running <= 8 + 2.0


@in_virtual_time
async def test_the_deadline_follows_the_round_trip() -> None:
    pair = Pair(Path(latency_s=0.4))
    link = await pair.open()
    link.busy = True
    running = asyncio.ensure_future(run_until_lost(link))
    await asyncio.sleep(30)
    assert link.rtt_s == pytest.approx(0.8)
    assert link.silence_limit_s == pytest.approx(6.4, abs=0.1)
    pair.world.hang(pair.bob.peer_id)
    assert 30 + 5.6 <= await running <= 30 + 8


@in_virtual_time
@pytest.mark.parametrize(("busy", "most_bytes"), [(True, 12_000), (False, 1_000)])
async def test_a_quiet_link_lives_and_does_not_flood(busy: bool, most_bytes: int) -> None:
    pair = Pair(Path(latency_s=0.05, loss=0.05))
    link = await pair.open()
    link.busy = busy
    running = asyncio.ensure_future(link.run(nothing))
    await asyncio.sleep(100)
    assert not running.done()
    assert link.sent_bytes + link.received_bytes < most_bytes
    await link.close()
    await running


@in_virtual_time
async def test_a_slow_uplink_is_no_hanging_peer() -> None:
    pair = Pair(Path(latency_s=0.02, bytes_per_s=300_000))
    received = asyncio.Event()
    link = await pair.open(lambda _frame, _body: received.set())
    link.busy = True
    running = asyncio.ensure_future(link.run(nothing))
    link.send(Chunk(), channel=1, payload=[bytes(6_000_000)])  # 20 s on the way; pings queue behind it
    await received.wait()
    assert now_s() >= 20
    assert not running.done()
    await asyncio.sleep(5)
    assert link.rtt_s is not None and link.rtt_s < 0.1  # pings that queued behind the payload are forgotten
    await link.close()
    await running


@pytest.mark.parametrize("kib_per_s", [32, 128, 10_000_000])
@in_virtual_time
async def test_a_hanging_peer_is_found_soon_whatever_was_sent_before(kib_per_s: int) -> None:
    pair = Pair(Path(latency_s=0.02, bytes_per_s=kib_per_s * 1024))
    link = await pair.open()
    link.busy = True
    running = asyncio.ensure_future(run_until_lost(link))
    link.send(Chunk(), channel=1, payload=[bytes(64 * MEBIBYTE)])
    await asyncio.sleep(30)
    assert not running.done(), "it takes in what it can"
    pair.world.hang(pair.bob.peer_id)
    assert await running <= 30 + 3.0


@pytest.mark.parametrize("slept_s", [0.1, 5.0, 20.0])
@in_virtual_time
async def test_a_peer_that_hangs_while_it_sends_is_found_as_soon(slept_s: float) -> None:
    pair = Pair(Path(latency_s=0.02, bytes_per_s=128 * 1024))
    link = await pair.open()
    link.busy = True
    running = asyncio.ensure_future(run_until_lost(link))
    await asyncio.sleep(0.1)
    pair.there.result().send(Chunk(), channel=1, payload=[bytes(64 * MEBIBYTE)])
    await asyncio.sleep(slept_s)
    pair.world.hang(pair.bob.peer_id)
    assert await running <= 0.1 + slept_s + 3.0


@in_virtual_time
async def test_large_frames_both_ways_over_a_slow_link_arrive() -> None:
    pair = Pair(Path(latency_s=0.02, bytes_per_s=128 * 1024))  # 1 Mbit/s
    arrived: list[str] = []
    link = await pair.open(lambda _frame, _body: arrived.append("there"))
    link.busy = pair.there.result().busy = True
    running = asyncio.ensure_future(link.run(lambda _frame, _body: arrived.append("here")))
    link.send(Chunk(), channel=1, payload=[bytes(64 * MEBIBYTE)])
    pair.there.result().send(Chunk(), channel=1, payload=[bytes(32 * MEBIBYTE)])
    await asyncio.sleep(520)
    assert arrived == ["here", "there"] and not running.done()
    assert link.rtt_s is not None and link.rtt_s < 0.1, "what queued behind the payload measured the payload"
    await link.close()
    await running


@in_virtual_time
async def test_the_wait_for_a_large_frame_is_no_round_trip() -> None:
    """Else the deadline would follow it, and a peer that hangs afterwards would be found late."""
    pair = Pair(Path(latency_s=0.02, bytes_per_s=MEBIBYTE))
    link = await pair.open()
    link.busy = True
    running = asyncio.ensure_future(run_until_lost(link))
    await asyncio.sleep(1)
    for _ in range(5):
        link.send(Chunk(), channel=1, payload=[bytes(8 * MEBIBYTE)])
        await asyncio.sleep(10)
    assert link.silence_limit_s == HEARTBEAT.min_silence_s
    running.cancel()


@in_virtual_time
async def test_our_own_sleep_is_not_blamed_on_the_peer() -> None:
    pair = Pair(Path(latency_s=0.01))
    link = await pair.open()
    link.busy = True
    running = asyncio.ensure_future(link.run(nothing))
    await asyncio.sleep(5)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.sleep_through(3600)  # a laptop that was closed; what the peer sent meanwhile is not read yet
    await asyncio.sleep(5)
    assert not running.done()
    await link.close()
    await running


@in_virtual_time
async def test_an_idle_link_beats_as_seldom_as_it_asks() -> None:
    pair = Pair(Path(latency_s=0.01))
    link = await pair.open()
    running = asyncio.ensure_future(link.run(nothing))
    await asyncio.sleep(1)
    begun = link.sent_bytes + link.received_bytes
    beats = 0
    tick = link._tick_at

    def count(at_s: float) -> None:
        nonlocal beats
        beats += 1
        tick(at_s)

    link._tick_at = count  # type: ignore[method-assign]
    await asyncio.sleep(100)
    assert beats <= 2 * 100 / HEARTBEAT.idle_s
    assert link.sent_bytes + link.received_bytes > begun, "it still asks whether the peer is there"
    await link.close()
    await running


@in_virtual_time
async def test_who_sends_more_frames_than_its_share_is_slowed_and_others_are_not() -> None:
    world = FakeWorld(seed=3)
    bob, greedy, other = world.join(), world.join(), world.join()
    config = replace(CONFIG, pace=FairPace(Pace(1000, 1000), Pace(2000, 2000), clock=now_s))
    handled: dict[str, int] = {greedy.peer_id: 0, other.peer_id: 0}

    async def answer(stream: Stream) -> None:
        link = await Link.accept(stream, HELLO, config=config)

        def count(_frame: Frame, _body: Body) -> None:
            handled[link.peer] += 1
            link.send(End(), channel=1)

        await link.run(count)

    await bob.serve(PROTOCOL, answer)
    links = {}
    for peer in (greedy, other):
        await peer.connect(await bob.addresses(), timeout_s=1)
        links[peer.peer_id] = await Link.connect(peer, bob.peer_id, PROTOCOL, HELLO, config=replace(CONFIG))
    waits_s: list[float] = []

    async def flood() -> None:
        while True:
            for _ in range(500):
                links[greedy.peer_id].send(End(), channel=1)
            await asyncio.sleep(0.01)

    answered = asyncio.Event()
    runs = [asyncio.ensure_future(flood()), asyncio.ensure_future(links[greedy.peer_id].run(nothing))]
    runs.append(asyncio.ensure_future(links[other.peer_id].run(lambda _frame, _body: answered.set())))
    await asyncio.sleep(5)
    for _ in range(100):
        answered.clear()
        began_s = now_s()
        links[other.peer_id].send(End(), channel=1)
        await answered.wait()
        waits_s.append(now_s() - began_s)
        await asyncio.sleep(0.05)
    seconds = 10.0 + sum(waits_s)
    assert handled[greedy.peer_id] < 1000 * seconds + 1000 + 40_000, "what one read brings is handled"
    assert max(waits_s) < 0.001
    for run in runs:
        run.cancel()
    await asyncio.gather(*runs, return_exceptions=True)
