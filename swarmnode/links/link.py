"""Link: frames over a stream to one peer, with a handshake, a heartbeat, and an orderly end that differs from a cut.

Send queue of one link: frames of one turn of the event loop leave in one write, and unsent bytes are bounded.

They count in the ledger, together with the stream's buffers for receiving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from swarmnode.codec.body import Body
from swarmnode.codec.frames import LARGE_BYTES, MAX_PAYLOAD_BYTES, Frame, FrameKind, FrameReader, pack_header
from swarmnode.codec.messages import KIND_OF, End, Error, Hello, Ping, Pong, Revocations, decode_body, encode_body
from swarmnode.errors import ErrorCode, PeerError, PeerLost, PeerRefused, ProtocolError, refusal
from swarmnode.ledger import Account, Full, MemoryLedger
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.link_statistics import MEASURED_BYTES, RoundTrips, ThroughputMeter, protocol_name
from swarmnode.links.pacing import Heartbeat, RateLimitedStream
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.interfaces import Buffer, Network, PeerId, Stream

MAX_UNSENT_BYTES = MAX_PAYLOAD_BYTES  # before the last frame: a peer that takes too little is not waited for
SMALL_BYTES = LARGE_BYTES  # always counted, so that the small frames of sessions need no counting


class SendQueue:
    """Buffers for a stream, between `put` and the network. They must not change before they have left."""

    def __init__(self, stream: Stream, ledger: MemoryLedger) -> None:
        self.sent_bytes = 0  # handed to the stream
        self._stream = stream
        self._waiting: list[Buffer] = []
        self._waiting_bytes = 0
        self._reservation = ledger.count(Account.MESSAGES)
        self.count()

    @property
    def total_bytes(self) -> int:
        """Sum of the bytes ever put."""
        return self.sent_bytes + self._waiting_bytes

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were queued for the stream and that this process has not sent yet."""
        return self._waiting_bytes + self._stream.unsent_bytes

    @property
    def full(self) -> bool:
        """Whether the queue holds more than MAX_UNSENT_BYTES, so that nothing more should be put."""
        return self.unsent_bytes > MAX_UNSENT_BYTES

    def put(self, buffers: Sequence[Buffer], size_bytes: int) -> bool:
        """Add buffers of `size_bytes` together. Returns whether they are the first since the last `flush`, so that the caller must
        schedule one."""
        first = not self._waiting
        self._waiting += buffers
        self._waiting_bytes += size_bytes
        return first

    def flush(self) -> int:
        """Hand everything to the stream and return the number of bytes. Raises PeerLost if the stream is closed."""
        waiting, self._waiting = self._waiting, []
        size_bytes, self._waiting_bytes = self._waiting_bytes, 0
        if waiting:
            self.sent_bytes += size_bytes
            self._stream.write(waiting)
            self.count()
        return size_bytes

    def count(self) -> None:
        """Update the ledger's reservation: the stream's buffers for receiving, and the unsent bytes, at least `SMALL_BYTES`."""
        held_bytes = self._stream.receive_bytes + max(SMALL_BYTES, self.unsent_bytes)
        if held_bytes != self._reservation.size_bytes:
            self._reservation.count(held_bytes)

    def give_up(self) -> None:
        """Drop all queued frames and release their memory."""
        self._waiting, self._waiting_bytes = [], 0
        self._reservation.release()


OnFrame = Callable[[Frame, Body], None]

ROOM_TIMEOUT_S = 1.0  # for a payload to find memory: less than the peer's patience with silence
ROOM_AGAIN_S = 0.05
MAX_PAUSE_S = 0.25  # without reading a peer that sends too much: less than its patience with silence
KNOWN_KINDS = frozenset(int(kind) for kind in FrameKind)


def check_greeting(theirs: Hello, ours: Hello, peer: PeerId) -> None:
    """Raise ProtocolError if the peer and this one have no protocol version in common, or the peer is of another swarm."""
    (oldest, newest), (our_oldest, our_newest) = theirs.spoken, ours.spoken
    if newest < our_oldest or our_newest < oldest:
        spoken = newest if newest < our_oldest else oldest
        text = f"peer {peer} speaks version {spoken} of the protocol, this node {our_newest}; upgrade the older one"
        raise ProtocolError(text, code=ErrorCode.VERSION, peer=peer)
    if theirs.swarm != ours.swarm:
        raise ProtocolError("it belongs to another swarm", code=ErrorCode.WRONG_SWARM, peer=peer)


class Link:
    """Framed stream to a peer. Made by `connect` or `accept`, read by `run`; `busy` says that answers are expected."""

    def __init__(self, stream: Stream, config: LinkConfig) -> None:
        self.peer: PeerId = stream.peer
        self.received_bytes = 0
        self.bandwidth_bps: float | None = None  # of sent data, as the peer measured it
        self._config = config
        self.claimant = Claimant(stream.group or stream.peer, stream.peer)
        self._protocol = protocol_name(stream.protocol)
        self._loop = asyncio.get_running_loop()
        self._heartbeat = Heartbeat(config.heartbeat, self._loop.time(), paced=config.rate_limiter is not None)
        self._stream = (
            stream
            if config.rate_limiter is None
            else RateLimitedStream(stream, config.rate_limiter, on_left=self._left)
        )
        self._reader = FrameReader(config.max_payload_bytes, config.ledger, greeted=False)
        self._throughput_meter = ThroughputMeter(config.clock, config.link_statistics.arrivals(self.peer))
        self._round_trips = RoundTrips(config.clock)
        self._unasked_bytes = 0  # sent in large frames since the last ping asked for their rate
        self._early: list[Frame] = []  # frames that came in one read with HELLO
        self._sending = SendQueue(self._stream, config.ledger)
        self.closed = False  # true if nothing more can be sent
        self._ended_here = False
        self._lost: PeerError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = "closed" if self.closed else "busy" if self.busy else "idle"
        rtt = "?" if self.rtt_s is None else f"{self.rtt_s * 1e3:.1f} ms"
        return f"<Link to {self.peer} {state} rtt {rtt} sent {self.sent_bytes} received {self.received_bytes} bytes>"

    @property
    def sent_bytes(self) -> int:
        """Sum of the bytes handed to the network."""
        return self._sending.sent_bytes

    @property
    def rtt_s(self) -> float | None:
        """Round trip in seconds; None before the first measurement."""
        return self._round_trips.rtt_s

    @property
    def received_bps(self) -> float | None:
        """Rate of the peer's recent large frames in bits/s; None if there were none."""
        return self._throughput_meter.rate_bps

    @property
    def moving(self) -> bool:
        """Whether a large payload is on its way, in either direction: a slow transfer is no standstill."""
        return self._unasked_bytes > 0 or self._round_trips.payload_ahead or self._reader.pending_bytes > 0

    @property
    def busy(self) -> bool:
        """Whether answers are expected, so that silence counts."""
        return self._heartbeat.busy

    @busy.setter
    def busy(self, busy: bool) -> None:
        if busy and not self.busy:
            self._heartbeat.record_arrival(self._loop.time())  # earlier silence does not count: no answer was expected
        self._heartbeat.busy = busy
        self._tick_soon()

    # -- making one

    @classmethod
    async def connect(cls, network: Network, peer: PeerId, protocol: str, hello: Hello, *, config: LinkConfig) -> Link:
        """Open a stream to a peer and exchange greetings. Raises PeerLost, PeerRefused, ProtocolError or NetworkDown."""
        began_s, rtt_s = asyncio.get_running_loop().time(), config.link_statistics.expected_rtt_s(peer)
        wait_s, addresses = config.connecting.wait_s(rtt_s=rtt_s), config.addresses_of(peer)
        stream = await network.open(peer, protocol, timeout_s=wait_s, addresses=addresses)
        link = cls(stream, config)
        try:
            link.send(config.gate.greeting(hello))
            # Reaching it took at least one round trip, which tells a hanging process from a long path.
            theirs = await link._handshake(link._loop.time() - began_s)
            link._let_in(theirs, hello, answers=True)
            config.gate.opened(link)
        except BaseException:
            link.abort()
            raise
        return link

    @classmethod
    async def accept(cls, stream: Stream, hello: Hello, *, config: LinkConfig) -> Link:
        """Answer a peer's greeting. A peer of another swarm or version gets a refusal and nothing more. Raises ProtocolError,
        PeerLost, PeerRefused."""
        link = cls(stream, config)
        try:
            theirs = await link._handshake(config.link_statistics.rtt_s(stream.peer))
            link._let_in(theirs, hello, answers=False)
        except ProtocolError as error:
            await link._refuse(error.code)
            raise
        except BaseException:
            link.abort()
            raise
        stream.let_in()
        link.send(config.gate.greeting(hello))
        config.gate.opened(link)
        return link

    def _let_in(self, theirs: Hello, ours: Hello, *, answers: bool) -> None:
        """Admit the peer by its greeting; `answers`: it will serve this peer. Raises ProtocolError if it is refused."""
        check_greeting(theirs, ours, self.peer)
        self._config.gate.admit(self.peer, self._stream.protocol, theirs, answers=answers)
        self._config.peer_versions.greeted(self.claimant, theirs)

    async def _handshake(self, rtt_s: float | None) -> Hello:
        """Return the HELLO in the peer's first frame. Raises ProtocolError if the frame is another one, PeerRefused if it is ERROR,
        PeerLost if none comes in time."""
        try:
            frame = await asyncio.wait_for(self._first_frame(), self._config.connecting.wait_s(rtt_s=rtt_s))
        except asyncio.TimeoutError:
            raise PeerLost(f"peer {self.peer} did not greet in time", peer=self.peer) from None
        body = decode_body(frame.kind, frame.body) if frame.kind in (FrameKind.HELLO, FrameKind.ERROR) else None
        if isinstance(body, Error):
            raise refusal(body.code, retry_s=body.retry_s, peer=self.peer)
        if not isinstance(body, Hello):
            raise ProtocolError("its first frame on a link is not HELLO", peer=self.peer)
        return body

    async def _first_frame(self) -> Frame:
        while True:
            count = await self._read()
            frames = list(self._reader.advance(count))
            await self._count_arrival(count, 0)
            if frames:
                self._early = frames[1:]
                return frames[0]

    async def _refuse(self, code: ErrorCode) -> None:
        try:
            self.send(Error(code))
            self._flush()
            await self._stream.close()
        except PeerLost:
            pass
        self._end()
        self._reader.give_up()

    # -- sending

    def send(
        self, body: Body, *, channel: int = 0, seq: int = 0, payload: Sequence[Buffer] = (), at_once: bool = False
    ) -> None:
        """Queue a frame. All frames of one turn of the event loop leave in one write, at its end or with a frame sent `at_once`.

        The payload's buffers must not change until they are sent. Raises PeerLost on a closed link. If the peer has not taken
        MAX_UNSENT_BYTES of earlier data the link is closed, which `run` reports.
        """
        if self.closed:
            raise self._lost or PeerLost(f"the link to peer {self.peer} is closed", peer=self.peer)
        if self._sending.full:
            self._fail(PeerLost(f"peer {self.peer} does not take what it is sent", peer=self.peer))
            return  # `run` raises it, like any other loss
        data = encode_body(body)
        payload_bytes = 0
        for part in payload:
            payload_bytes += len(part)
        head = pack_header(KIND_OF[type(body)], len(data), payload_bytes, channel, seq) + data
        is_first = self._sending.put((head, *payload), len(head) + payload_bytes)
        if at_once:
            self._flush()
        elif is_first:
            self._loop.call_soon(self._flush)
        if payload_bytes >= MEASURED_BYTES:
            self._unasked_bytes += payload_bytes
            self._tick_soon()

    def _flush(self) -> None:
        if self.closed:
            return
        try:
            self._config.traffic.sent_bytes[self._protocol] += self._sending.flush()
        except PeerLost as error:
            self._fail(error)

    async def drain(self) -> None:
        """Wait until the send queue is short. Raises PeerLost if the link died meanwhile."""
        self._flush()
        await self._stream.drain()

    # -- receiving

    async def run(self, on_frame: OnFrame) -> None:
        """Read until the peer ends the link. Raises PeerLost if it is cut or silent, PeerRefused if it sends ERROR, ProtocolError
        if it breaks the rules.

        `on_frame(frame, body)` is called for each frame on a channel above 0. A ProtocolError that it raises is sent to the peer as
        its code and ends the link.
        """
        try:
            self._tick()
            ended = self._dispatch(self._early, on_frame)
            while not ended:
                count = await self._read()
                frames = list(self._reader.advance(count))
                ended = self._dispatch(frames, on_frame)
                await self._count_arrival(count, len(frames))  # last, since no caller waits for it
            await self._stream.close()
        except ProtocolError as error:
            error.peer = self.peer
            await self._refuse(error.code)
            raise
        except PeerError as error:
            if not self._ended_here:
                raise self._lost or error from None
        finally:
            self._end()
            self._stream.abort()
            self._reader.give_up()

    async def _read(self) -> int:
        """Read bytes into the frame reader and return their number. Raises PeerLost if the link was lost or cut."""
        room, limiter = await self._room(), self._config.download_limiter
        count = await self._stream.read_into(room if limiter is None else room[: limiter.burst_bytes])
        if self._lost is not None:
            raise self._lost
        if not count:
            raise PeerLost(f"peer {self.peer} cut the link", peer=self.peer)
        return count

    async def _count_arrival(self, count: int, frames: int) -> None:
        """Count `count` bytes that completed `frames` frames. A peer that sends faster than it may is not read for a moment, so
        that its stream fills up and it slows down."""
        now_s, limiter = self._loop.time(), self._config.download_limiter
        self._heartbeat.record_arrival(now_s)
        self._config.link_statistics.record_arrival(self.peer, now_s)
        self.received_bytes += count
        self._config.traffic.received_bytes[self._protocol] += count
        self._throughput_meter.record(count, self._reader.pending_bytes)
        if self._reader.pending_bytes:
            self._came()
        if limiter is not None:
            await asyncio.sleep(limiter.reserve(count))
        wait_s = self._config.pace.wait_s(self.claimant, frames)
        if wait_s:
            await asyncio.sleep(min(wait_s, MAX_PAUSE_S))

    async def _room(self) -> memoryview:
        """Return the buffer for the next bytes. Raises ProtocolError (BUSY) if a payload found no memory for ROOM_TIMEOUT_S
        seconds."""
        end_s = self._loop.time() + ROOM_TIMEOUT_S
        while True:
            try:
                return self._reader.room()
            except Full as error:
                text = f"a payload of peer {self.peer}: {error}"
            if self._loop.time() >= end_s:  # not from Full, whose traceback would keep the payload
                raise ProtocolError(text, code=ErrorCode.BUSY, peer=self.peer)
            await asyncio.sleep(ROOM_AGAIN_S)

    def _dispatch(self, frames: Iterable[Frame], on_frame: OnFrame) -> bool:
        """Handle frames; return True if one of them ended the link. Raises PeerRefused on ERROR, ProtocolError on a frame that is
        out of place."""
        for frame in frames:
            if frame.kind not in KNOWN_KINDS:
                continue  # unknown frames of a newer version are ignored
            body = decode_body(frame.kind, frame.body)
            if frame.channel:
                on_frame(frame, body)
                self._came()
            elif isinstance(body, Ping):
                if not self.closed:  # frames sent before the end may still be leaving
                    self.send(Pong(self._throughput_meter.rate_bps or 0.0), seq=frame.seq)
                if self._throughput_meter.rate_bps:
                    self._config.link_statistics.received(self.peer, self._throughput_meter.rate_bps)
            elif isinstance(body, Pong):
                if body.received_bps:
                    self.bandwidth_bps = body.received_bps
                    self._config.link_statistics.sent(self.peer, body.received_bps)
                sample_s = self._round_trips.pong(frame.seq)
                if sample_s is not None:
                    self._config.traffic.record_round_trip(self._protocol, sample_s)
                    self._config.link_statistics.round_trip(self.peer, sample_s)
            elif isinstance(body, End):
                return True
            elif isinstance(body, Revocations):
                self._config.gate.accept_revocations(self, body.number, body.signed)
            elif isinstance(body, Error):
                raise refusal(body.code, retry_s=body.retry_s, peer=self.peer)
            else:
                raise ProtocolError(f"a {FrameKind(frame.kind).name} came on channel 0")
        return False

    # -- heartbeat

    @property
    def silence_limit_s(self) -> float:
        """Seconds that the peer may be silent while something is expected of it."""
        return self._heartbeat.limit_s(self.rtt_s, payload=self._round_trips.payload_ahead)

    def _left(self) -> None:
        self._heartbeat.left(self._loop.time())

    def _tick(self, expected_at: float | None = None) -> None:
        if self.closed:
            return
        heartbeat, now_s = self._heartbeat, self._loop.time()
        self._sending.count()
        late_s = 0.0 if expected_at is None else now_s - expected_at
        elsewhere_s = self._config.link_statistics.arrived_at_s(self.peer)
        silence_s = heartbeat.too_long_s(now_s, self.silence_limit_s, late_s=late_s, elsewhere_s=elsewhere_s)
        if silence_s is not None:
            self._fail(PeerLost(f"peer {self.peer} hangs: silent for {silence_s:.1f} s", peer=self.peer))
            return
        if heartbeat.wants_sign(self._sending.total_bytes):
            self.send(Pong(self._throughput_meter.rate_bps or 0.0))  # answers no PING in particular
        if not self._round_trips.begun or self._unasked_bytes or heartbeat.wants_ping(now_s):
            heartbeat.pinged_at_s = now_s
            self.send(Ping(), seq=self._round_trips.ping(queued_bytes=self._unasked_bytes))
            self._unasked_bytes = 0
        self._tick_at(now_s + (self._config.heartbeat.busy_s if self._reader.pending_bytes else heartbeat.beat_s))

    def _tick_at(self, at_s: float) -> None:
        self._timer = self._loop.call_at(at_s, self._tick, at_s)

    def _tick_soon(self) -> None:
        """Bring the next check of the link's heartbeat forward to `busy_s` seconds from now; on an idle link it would come much
        later."""
        soon_s = self._loop.time() + self._config.heartbeat.busy_s
        if self._timer is not None and not self.closed and self._timer.when() > soon_s:
            self._timer.cancel()
            self._tick_at(soon_s)

    def _came(self) -> None:
        self._heartbeat.came(self._sending.total_bytes)
        self._tick_soon()

    # -- the end

    def _fail(self, error: PeerError) -> None:
        self._lost = error
        self._end()
        self._stream.abort()  # wakes `run`

    def cut(self, code: ErrorCode) -> None:
        """End the link at once with an ERROR of `code`: the peer is not welcome any more."""
        if not self.closed:
            self.send(Error(code))
            self._flush()
            self._fail(PeerRefused(f"this peer does not admit {self.peer} any more", code=code, peer=self.peer))

    def _end(self) -> None:
        self.closed = True
        self._sending.give_up()
        self._config.gate.closed(self)
        if self._timer is not None:
            self._timer.cancel()

    async def close(self) -> None:
        """End the link in order: the peer reads END. Calling it again changes nothing."""
        if self.closed:
            return
        self.send(End())
        self._flush()
        self._ended_here = True
        self._end()
        await self._stream.close()

    def abort(self) -> None:
        """Drop the link at once; unsent frames are lost."""
        self._end()
        self._stream.abort()
        self._reader.give_up()
