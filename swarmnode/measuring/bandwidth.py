"""Bandwidth tests between two peers whose ordinary traffic has not shown their bandwidth yet (`protocol/frames.md`).

The tested peer sends back as much as it receives, so both learn their upload and download. The links measure
and keep the results (`links/link_statistics.py`). This file decides which peers to ask, how much to send, and which to
refuse. No site outside the swarm is used.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.measuring_messages import MAX_PROBE_BYTES, Probe
from swarmnode.codec.messages import Error
from swarmnode.errors import ErrorCode, NetworkDown, PeerError, refusal
from swarmnode.links.link import Link
from swarmnode.net.interfaces import PeerId, Stream
from swarmnode.net.tasks import Tasks, cancel_and_wait
from swarmnode.peer.questions import LocalPeer

log = logging.getLogger(__name__)

PROBE_PROTOCOL = "/swarmnode/probe/1"
CHANNEL = 1
MAX_ANSWERED = 4096
KIB = 1024
# A measurement needs 64 KiB of a frame beyond its first read, of 96 KiB at most; 512 KiB in all.
SIZES = (160 * KIB, 352 * KIB)
TEST_BYTES = sum(SIZES)  # most bytes of a test with one peer, in each direction


@dataclass(frozen=True)
class ProbeConfig:
    """Settings of bandwidth tests. A test begins small, and goes on only while it is quick."""

    quick_s: float = 0.25  # a round that took longer is the last
    answer_s: float = 4.0  # patience for one answer
    result_wait_s: float = 1.0  # after the last round: how long to wait for the peer's measurement of it
    first_test_s: float = 5.0  # until the first test; doubles until each of the next ones
    test_interval_s: float = 60.0  # longest interval between tests
    pause_s: float = 600.0  # before the same peer is tested, or answered, again
    enough_peers: int = 3  # measured peers (away, or at home) after which no more of them are tested
    answers_at_once: int = 1


class Bandwidth(NamedTuple):
    """Upload and download of a machine in bits/s, from tests with `peers` others; 0 if unknown."""

    up_bps: float
    down_bps: float
    peers: int


class Quota:
    """Bytes answered to each peer lately, in order of the first answer. Entries older than the pause are dropped."""

    def __init__(self, pause_s: float, clock: Callable[[], float]) -> None:
        self._pause_s = pause_s
        self._clock = clock
        self._answered: dict[PeerId, tuple[float, int]] = {}  # (time of the first answer, bytes)

    def grant(self, peer: PeerId, size_bytes: int) -> float:
        """Count `size_bytes` for `peer` and return 0; if that would exceed its quota, count nothing and return the seconds after
        which it may ask again."""
        now_s = self._clock()
        # The oldest may go if it is older than the pause, or if there are too many. Only the oldest is checked, so many peers
        # cost no more than few.
        while self._answered:
            oldest = next(iter(self._answered))
            if now_s - self._answered[oldest][0] < self._pause_s and len(self._answered) <= MAX_ANSWERED:
                break
            del self._answered[oldest]
        since_s, spent_bytes = self._answered.get(peer, (now_s, 0))
        if spent_bytes + size_bytes > TEST_BYTES:
            return self._pause_s - (now_s - since_s)
        self._answered[peer] = (since_s, spent_bytes + size_bytes)
        return 0.0


class Prober:
    """Bandwidth tests with other peers, and answers to theirs. `busy` returns whether this node needs its line for other work."""

    def __init__(
        self, peer: LocalPeer, *, busy: Callable[[], bool], config: ProbeConfig = ProbeConfig(), seed: object = None
    ) -> None:
        self._network = peer.network
        self._hello = peer.hello
        self._link_config = replace(peer.link_config, max_payload_bytes=MAX_PROBE_BYTES)
        self._busy = busy
        self._config = config
        self._random = random.Random(repr(seed or peer.network.peer_id))
        self._clock = asyncio.get_running_loop().time
        self._quota = Quota(config.pause_s, self._clock)
        self._asked: dict[PeerId, float] = {}
        self._answering = 0
        self._filler = memoryview(os.urandom(max(SIZES)))  # random bytes, which cannot be compressed
        self._tasks = Tasks("bandwidth tests", on_crash=peer.link_config.supervisor.ends_peer)

    async def start(self, candidates: Callable[[], Iterable[PeerId]]) -> None:
        """Answer tests from now on, and test some of the `candidates` in the background until `close`: none while enough of
        them are measured."""
        await self.serve()
        self._tasks.spawn(self._explore(candidates), "explore")

    async def serve(self) -> None:
        """Start to answer tests."""
        await self._network.serve(PROBE_PROTOCOL, self._answer)

    async def close(self) -> None:
        """Stop testing. Tests of other peers are answered until the network closes."""
        await self._tasks.close()

    # -- asking

    async def _explore(self, candidates: Callable[[], Iterable[PeerId]]) -> None:
        interval_s = self._config.first_test_s
        while True:
            await asyncio.sleep(interval_s * self._random.uniform(0.5, 1.5))
            if self._busy():
                continue
            interval_s = min(self._config.test_interval_s, 2 * interval_s)
            # Test a peer of this home network and one elsewhere, while few of either kind were measured: one kind says nothing of
            # the other.
            statistics, known = self._link_config.link_statistics, set(candidates())
            at_home = {peer for peer in known if statistics.at_home(peer)}
            for some in (at_home, known - at_home):
                rated = some & statistics.rated_peers()
                if len(rated) >= self._config.enough_peers or (peer := self.choose(some - rated)) is None:
                    continue
                try:
                    await self.test(peer)
                except (PeerError, NetworkDown) as error:
                    log.info("no bandwidth test with peer %s: %s", peer, error)

    def choose(self, candidates: Iterable[PeerId]) -> PeerId | None:
        """Return a random candidate that was not asked lately; None if there is none."""
        now_s = self._clock()
        self._asked = {peer: at_s for peer, at_s in self._asked.items() if now_s - at_s < self._config.pause_s}
        fresh = sorted(peer for peer in candidates if peer not in self._asked and peer != self._network.peer_id)
        return self._random.choice(fresh) if fresh else None

    async def test(self, peer: PeerId) -> None:
        """Test the bandwidth to a peer. Raises PeerRefused if it is busy or was asked too often, PeerLost if it is lost,
        NetworkDown."""
        self._asked[peer] = self._clock()
        link = await Link.connect(self._network, peer, PROBE_PROTOCOL, self._hello, config=self._link_config)
        link.busy = True
        answers: asyncio.Queue[Body] = asyncio.Queue()
        running = asyncio.ensure_future(link.run(lambda _frame, body: answers.put_nowait(body)))
        rounds = asyncio.ensure_future(self._rounds(link, answers))
        try:
            await asyncio.wait({running, rounds}, return_when=asyncio.FIRST_COMPLETED)
            if rounds.done():
                rounds.result()
                await link.close()
            await running
        finally:
            await cancel_and_wait(rounds, running)
            link.abort()

    async def _rounds(self, link: Link, answers: asyncio.Queue[Body]) -> None:
        """Send probes of growing size and wait for their answers, while they are quick; then wait for the peer's measurement."""
        for size in SIZES:
            began_s = self._clock()
            link.send(Probe(answer_bytes=size), channel=CHANNEL, payload=[self._filler[:size]])
            try:
                answer = await asyncio.wait_for(answers.get(), self._config.answer_s)
            except asyncio.TimeoutError:
                break  # the links have measured the part that arrived
            if isinstance(answer, Error):
                raise refusal(answer.code, retry_s=answer.retry_s, peer=link.peer)
            if self._clock() - began_s > self._config.quick_s:
                break
        await asyncio.sleep(self._config.result_wait_s)

    async def probe_candidates(self, candidates: Iterable[PeerId], most: int) -> Bandwidth:
        """Test the bandwidth to `most` of the candidates, one after another; peers that refuse or are lost do not count. Raises
        NetworkDown."""
        left, tested = set(candidates), 0
        while tested < most and (peer := self.choose(left)) is not None:
            left.discard(peer)
            try:
                await self.test(peer)
            except PeerError as error:
                log.info("no bandwidth test with peer %s: %s", peer, error)
            else:
                tested += 1
        statistics = self._link_config.link_statistics
        return Bandwidth(statistics.up_bps, statistics.down_bps, tested)

    # -- answering

    async def _answer(self, stream: Stream) -> None:
        link = await Link.accept(stream, self._hello, config=self._link_config)
        link.busy = True
        taken = self._answering < self._config.answers_at_once
        self._answering += taken
        try:
            await link.run(lambda frame, body: self._pay_back(link, frame, body, taken))
        finally:
            self._answering -= taken

    def _pay_back(self, link: Link, frame: Frame, body: Body, taken: bool) -> None:
        if not isinstance(body, Probe):
            link.send(Error(ErrorCode.MALFORMED), channel=frame.channel)
            return
        wait_s = self._config.test_interval_s if self._busy() or not taken else 0.0
        size = min(body.answer_bytes, len(frame.payload))  # never more than was received
        wait_s = wait_s or self._quota.grant(link.peer, len(frame.payload))
        if wait_s:
            link.send(Error(ErrorCode.BUSY, wait_s), channel=frame.channel)
        else:
            link.send(Probe(), channel=frame.channel, payload=[self._filler[:size]])
