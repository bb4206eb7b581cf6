"""Tests of bandwidth between two peers, for those whose ordinary traffic has not shown it yet (`protocol/frames.md`).

What one side sends the other pays back, so both learn what they can send and receive. The links measure
(`net/measuring/traffic.py`) and
keep it (`net/measuring/link_statistics.py`); here it is decided whom to ask, how much to send, and whom to refuse.
Never against a site outside.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.measuring_messages import MAX_PROBE_BYTES, Probe
from swarmnode.codec.messages import Error
from swarmnode.errors import ErrorCode, NetworkDown, PeerError, refusal
from swarmnode.net.interfaces import PeerId, Stream
from swarmnode.net.links.link import Link
from swarmnode.net.tasks import Tasks, cancel_and_wait
from swarmnode.peer.local_peer import LocalPeer

log = logging.getLogger(__name__)

PROBE_PROTOCOL = "/swarmnode/probe/1"
CHANNEL = 1
MAX_ANSWERED = 4096
KIB = 1024
# A gauge needs 64 KiB of a frame beyond its first read, of 96 KiB at most; 512 KiB in all.
SIZES = (160 * KIB, 352 * KIB)
TEST_BYTES = sum(SIZES)  # that a test with one peer sends at most, and takes


@dataclass(frozen=True)
class ProbeConfig:
    """How much a test may cost. A test begins small, and goes on only while it is quick."""

    quick_s: float = 0.25  # a round that took longer is the last
    answer_s: float = 4.0  # patience for one answer
    hear_s: float = 1.0  # after the last round: how long to wait to be told how fast it came
    first_look_s: float = 5.0  # until the first test, and twice as long until each of the next ones, up to
    look_s: float = 60.0
    pause_s: float = 600.0  # before the same peer is tested, or answered, again
    enough_peers: int = 3  # whose paths were measured: then the line is known well enough, or the network at home
    answers_at_once: int = 1


class Bandwidth(NamedTuple):
    """What a machine can send and receive, bits/s, as tests with `peers` others have shown; 0 where they have not."""

    up_bps: float
    down_bps: float
    peers: int


class Quota:
    """Who was answered how much lately, in the order in which they came. The entries of a pause ago are dropped."""

    def __init__(self, pause_s: float, clock: Callable[[], float]) -> None:
        self._pause_s = pause_s
        self._clock = clock
        self._answered: dict[PeerId, tuple[float, int]] = {}  # since when, bytes

    def __repr__(self) -> str:
        return f"<Quota of {len(self._answered)} peers>"

    def grant(self, peer: PeerId, size_bytes: int) -> float:
        """Take the bytes from what the peer may ask for; else the seconds after which it may ask again."""
        now_s = self._clock()
        while self._answered and self._is_past(next(iter(self._answered)), now_s):
            del self._answered[next(iter(self._answered))]
        since_s, spent_bytes = self._answered.get(peer, (now_s, 0))
        if spent_bytes + size_bytes > TEST_BYTES:
            return self._pause_s - (now_s - since_s)
        self._answered[peer] = (since_s, spent_bytes + size_bytes)
        return 0.0

    def _is_past(self, peer: PeerId, now_s: float) -> bool:
        """Or one of too many: an entry is looked at when it is the oldest, so that many peers cost no more than few."""
        return now_s - self._answered[peer][0] >= self._pause_s or len(self._answered) > MAX_ANSWERED


class Prober:
    """Tests others and answers their tests. `busy` says that this node has better things to send at the moment."""

    def __init__(
        self,
        peer: LocalPeer,
        *,
        busy: Callable[[], bool],
        config: ProbeConfig = ProbeConfig(),
        seed: object = None,
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
        self._filler = memoryview(os.urandom(max(SIZES)))  # which no line compresses
        self._tasks = Tasks("bandwidth tests", on_crash=peer.link_config.supervisor.ends_peer)

    def __repr__(self) -> str:
        return f"<Prober asked {len(self._asked)} peers, {self._quota!r}, {self._link_config.link_statistics!r}>"

    async def start(self, candidates: Callable[[], Iterable[PeerId]]) -> None:
        """Answer tests, and test some of the `candidates` until enough is known."""
        await self.serve()
        self._tasks.spawn(self._explore(candidates), "explore")

    async def serve(self) -> None:
        """Answer tests from now on."""
        await self._network.serve(PROBE_PROTOCOL, self._answer)

    async def close(self) -> None:
        """Test nobody any more."""
        await self._tasks.close()

    # -- asking

    async def _explore(self, candidates: Callable[[], Iterable[PeerId]]) -> None:
        look_s = self._config.first_look_s
        while True:
            await asyncio.sleep(look_s * self._random.uniform(0.5, 1.5))
            if self._busy():
                continue
            look_s = min(self._config.look_s, 2 * look_s)
            for peer in self._unknown(set(candidates())):
                try:
                    await self.test(peer)
                except (PeerError, NetworkDown) as error:
                    log.info("no bandwidth test with peer %s: %s", peer, error)

    def _unknown(self, candidates: set[PeerId]) -> Iterator[PeerId]:
        """Somebody of this home and somebody elsewhere, as long as few of either were measured: one says nothing of the other."""
        statistics = self._link_config.link_statistics
        at_home = {peer for peer in candidates if statistics.at_home(peer)}
        for some in (at_home, candidates - at_home):
            rated = some & statistics.rated_peers()
            if len(rated) < self._config.enough_peers and (peer := self.choose(some - rated)) is not None:
                yield peer

    def choose(self, candidates: Iterable[PeerId]) -> PeerId | None:
        """Somebody who was not asked lately; None where everybody was."""
        now_s = self._clock()
        self._asked = {peer: at_s for peer, at_s in self._asked.items() if now_s - at_s < self._config.pause_s}
        fresh = sorted(peer for peer in candidates if peer not in self._asked and peer != self._network.peer_id)
        return self._random.choice(fresh) if fresh else None

    async def test(self, peer: PeerId) -> None:
        """One test with a peer. Raises PeerLost; PeerRefused where it is busy or was asked too often; NetworkDown."""
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
        """There and back with ever more, while it is quick; then until the peer has said how fast ours came."""
        for size in SIZES:
            began_s = self._clock()
            link.send(Probe(answer_bytes=size), channel=CHANNEL, payload=[self._filler[:size]])
            try:
                answer = await asyncio.wait_for(answers.get(), self._config.answer_s)
            except asyncio.TimeoutError:
                break  # what came of it is known to the gauges
            if isinstance(answer, Error):
                raise refusal(answer.code, retry_s=answer.retry_s, peer=link.peer)
            if self._clock() - began_s > self._config.quick_s:
                break
        await asyncio.sleep(self._config.hear_s)

    async def look_around(self, candidates: Iterable[PeerId], most: int) -> Bandwidth:
        """Test with `most` of the candidates, one after another; who refuses or is lost does not count. Raises NetworkDown."""
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
        wait_s = self._config.look_s if self._busy() or not taken else 0.0
        size = min(body.answer_bytes, len(frame.payload))  # nobody gets more than he gave
        wait_s = wait_s or self._quota.grant(link.peer, len(frame.payload))
        if wait_s:
            link.send(Error(ErrorCode.BUSY, wait_s), channel=frame.channel)
        else:
            link.send(Probe(), channel=frame.channel, payload=[self._filler[:size]])
