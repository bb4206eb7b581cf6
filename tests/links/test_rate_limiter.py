"""A node that may send, or take in, only so fast: the rate over all links, the order, the heartbeat, what the peer measures."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Ready
from swarmnode.errors import PeerLost
from swarmnode.links.link import Link
from swarmnode.links.link_statistics import ThroughputMeter
from swarmnode.links.pacing import BURST_S, CLOSE_TIMEOUT_S, RateLimiter
from swarmnode.net.memory.medium import Path
from tests.links.test_link import CONFIG, HELLO, Pair, now_s
from tests.net.virtual import in_virtual_time

RATE_BPS = 8e6
MEGABYTE = 1_000_000


def test_a_bucket_keeps_to_its_rate() -> None:
    clock_s = 100.0
    rate_limiter = RateLimiter(RATE_BPS, clock=lambda: clock_s)
    waits = [rate_limiter.reserve(MEGABYTE) for _ in range(3)]
    assert waits == pytest.approx([1 - BURST_S, 2 - BURST_S, 3 - BURST_S])
    clock_s += 10
    assert rate_limiter.reserve(1000) == 0.0, "what was not used a moment ago is not lost"
    assert rate_limiter.reserve(MEGABYTE) == pytest.approx(1.0, rel=0.05), "but no more than a moment's"


class Receiver:
    """Notes when frames arrive."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[int, float]] = []
        self.news = asyncio.Event()

    def __call__(self, frame: Frame, _body: Body) -> None:
        self.arrivals.append((frame.seq, now_s()))
        self.news.set()

    async def wait_for(self, count: int) -> None:
        while len(self.arrivals) < count:
            self.news.clear()
            await self.news.wait()


async def rate_limited_link(rate_limiter: RateLimiter, receiver: Receiver) -> tuple[Link, asyncio.Task[None]]:
    """A link over a path of 20 ms whose sender keeps to the pace."""
    pair = Pair(Path(latency_s=0.02))
    await pair.serve(receiver)
    link = await Link.connect(
        pair.alice, pair.bob.peer_id, "/test/link/1", HELLO, config=replace(CONFIG, rate_limiter=rate_limiter)
    )
    return link, asyncio.ensure_future(link.run(lambda _frame, _body: None))


@pytest.mark.parametrize("links", [1, 2, 3])
@in_virtual_time
async def test_links_share_the_rate_fairly(links: int) -> None:
    rate_limiter = RateLimiter(RATE_BPS, clock=now_s)
    receivers = [Receiver() for _ in range(links)]
    opened = [await rate_limited_link(rate_limiter, receiver) for receiver in receivers]
    began_s = now_s()
    for link, _ in opened:
        link.busy = True
        for seq in range(3):
            link.send(Ready(0), channel=1, seq=seq, payload=[bytes(MEGABYTE)])
    await asyncio.gather(*(receiver.wait_for(3) for receiver in receivers))
    took_s = now_s() - began_s
    assert took_s == pytest.approx(3 * links * MEGABYTE * 8 / RATE_BPS, rel=0.02)
    for receiver in receivers:
        assert [seq for seq, _ in receiver.arrivals] == [0, 1, 2], "in order"
        assert receiver.arrivals[0][1] - began_s == pytest.approx(took_s / 3, rel=0.1), (
            "none is served before the others"
        )
    for link, reading in opened:
        await link.close()
        await reading


@pytest.mark.parametrize(("rate_bps", "links"), [(RATE_BPS, 8), (1e6, 1), (0.25e6, 1), (1e6, 4)])
@in_virtual_time
async def test_what_the_pace_keeps_back_is_no_silence_of_the_peer(rate_bps: float, links: int) -> None:
    """Slower than any uplink that a link allows for: pings queue behind payloads for far longer than a peer may be silent."""
    rate_limiter = RateLimiter(rate_bps, clock=now_s)
    receivers = [Receiver() for _ in range(links)]
    opened = [await rate_limited_link(rate_limiter, receiver) for receiver in receivers]
    for link, _ in opened:
        link.busy = True
        for seq in range(3):
            link.send(Ready(0), channel=1, seq=seq, payload=[bytes(MEGABYTE)])
    arrived = asyncio.gather(*(receiver.wait_for(3) for receiver in receivers))
    readings = [reading for _, reading in opened]
    await asyncio.wait([arrived, *readings], return_when=asyncio.FIRST_COMPLETED)
    assert not any(reading.done() for reading in readings), "a slow link is not a dead one"
    await arrived
    assert now_s() >= 3 * links * MEGABYTE * 8 / rate_bps * 0.98
    for link, reading in opened:
        await link.close()
        await reading


@pytest.mark.parametrize(("rate_bps", "links"), [(RATE_BPS, 1), (RATE_BPS, 3), (1e6, 1)])
@in_virtual_time
async def test_what_comes_in_keeps_to_a_rate_over_all_links(rate_bps: float, links: int) -> None:
    """Within 5 % over 10 s, and whoever sends takes the wait for no silence."""
    limited = replace(CONFIG, download_limiter=RateLimiter(rate_bps, clock=now_s))
    frame_bytes, count = int(rate_bps / 8), -(-10 // links)
    receivers = [Receiver() for _ in range(links)]
    sending = []
    began_s = now_s()
    for receiver in receivers:
        pair = Pair(Path(latency_s=0.02), limited)
        await pair.serve(receiver)
        link = await Link.connect(pair.alice, pair.bob.peer_id, "/test/link/1", HELLO, config=CONFIG)
        sending.append((link, asyncio.ensure_future(link.run(lambda _frame, _body: None))))
        link.busy = True
        for seq in range(count):
            link.send(Ready(0), channel=1, seq=seq, payload=[bytes(frame_bytes)])
    await asyncio.gather(*(receiver.wait_for(count) for receiver in receivers))
    assert now_s() - began_s == pytest.approx(links * count, rel=0.05)
    for link, reading in sending:
        await link.close()
        await reading


@in_virtual_time
async def test_a_peer_that_hangs_is_found_behind_a_slow_pace() -> None:
    """Soon, however much the pace still keeps back."""
    pair = Pair(Path(latency_s=0.02))
    await pair.serve()
    config = replace(CONFIG, rate_limiter=RateLimiter(1e6, clock=now_s))
    link = await Link.connect(pair.alice, pair.bob.peer_id, "/test/link/1", HELLO, config=config)
    link.busy = True
    pair.world.hang(pair.bob.peer_id)
    link.send(Ready(0), channel=1, payload=[bytes(8 * MEGABYTE)])  # 64 s
    with pytest.raises(PeerLost, match="hangs: silent for"):
        await link.run(lambda _frame, _body: None)
    assert now_s() <= 3.0


@in_virtual_time
async def test_the_peer_measures_what_comes_in() -> None:
    receiver = Receiver()
    link, reading = await rate_limited_link(RateLimiter(RATE_BPS, clock=now_s), receiver)
    link.busy = True
    assert link.bandwidth_bps is None
    for seq in range(4):
        link.send(Ready(0), channel=1, seq=seq, payload=[bytes(MEGABYTE)])
    await receiver.wait_for(4)
    await asyncio.sleep(1.0)  # of virtual time: a heartbeat later
    assert link.bandwidth_bps is not None
    assert link.bandwidth_bps == pytest.approx(RATE_BPS, rel=0.05)
    assert not link.closed, "a slow link is not a dead one"
    await link.close()
    await reading


@in_virtual_time
async def test_what_was_sent_before_the_end_arrives() -> None:
    receiver = Receiver()
    link, reading = await rate_limited_link(RateLimiter(RATE_BPS, clock=now_s), receiver)
    link.send(Ready(0), channel=1, payload=[bytes(MEGABYTE)])
    link.send(Ready(7), channel=1, seq=1)
    await link.close()
    await receiver.wait_for(2)
    assert [seq for seq, _ in receiver.arrivals] == [0, 1]
    await reading


@in_virtual_time
async def test_who_leaves_does_not_wait_for_minutes() -> None:
    link, reading = await rate_limited_link(RateLimiter(1e4, clock=now_s), Receiver())
    link.send(Ready(0), channel=1, payload=[bytes(MEGABYTE)])  # 800 s
    await link.close()
    assert now_s() <= CLOSE_TIMEOUT_S + 1.0
    await reading


@in_virtual_time
async def test_nothing_is_left_after_an_abort() -> None:
    link, reading = await rate_limited_link(RateLimiter(RATE_BPS, clock=now_s), Receiver())
    link.send(Ready(0), channel=1, payload=[bytes(MEGABYTE)])
    await asyncio.sleep(0.1)
    link.abort()
    await asyncio.gather(reading, return_exceptions=True)
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("pace")]


def test_a_gauge_counts_the_time_within_large_frames() -> None:
    now = [0.0]
    throughput_meter = ThroughputMeter(lambda: now[0])
    throughput_meter.record(10_000, 0)
    assert throughput_meter.rate_bps is None, "small frames say nothing"
    for _ in range(3):
        throughput_meter.record(1000, 1000)  # the first bytes of a frame of 1 MB
        for read in range(1, 11):
            now[0] += 0.1
            throughput_meter.record(100_000, 1000 + read * 100_000 if read < 10 else 0)
        now[0] += 60.0  # nothing to say for a minute
        throughput_meter.record(50, 0)
    assert throughput_meter.rate_bps == pytest.approx(8e6, rel=0.01)
