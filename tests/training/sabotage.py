"""A peer that stops doing its part at its n-th message, in a way that its links do not show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame, FrameKind, FrameReader, pack_header
from swarmnode.codec.messages import KIND_OF, Fault, decode_body, encode_body
from swarmnode.codec.training_messages import Done, Failed, Reduced
from swarmnode.errors import ErrorCode
from swarmnode.net.interfaces import Buffer, Dht, Network, PeerId, Stream, StreamHandler
from swarmnode.net.memory.network import FakeNetwork, FakeWorld


class Ill(Enum):
    """What a peer does from some message on."""

    SILENT = "stops answering"  # as by SIGSTOP
    PINGS = "answers only PING"  # its links live, no frame of its own leaves it
    FAILS = "answers FAILED"


class Saboteur:
    """Counts the frames of one peer, those that it sends and those that it hears; `ill` from number `after` on."""

    def __init__(self, ill: Ill, after: int) -> None:
        self.ill = ill
        self.after = after
        self.count = 0
        self.on_silent: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<Saboteur that {self.ill.value} from message {self.after} on, at {self.count}>"

    @property
    def tripped(self) -> bool:
        """Whether it has begun."""
        return self.count >= self.after

    def note(self, frame: Frame) -> None:
        """A frame passes."""
        if frame.channel:
            self.count += 1
            if self.count == self.after and self.ill is Ill.SILENT:
                self.on_silent()

    def instead_of(self, frame: Frame) -> Frame | None:
        """What leaves the peer instead of a frame of its own."""
        if not self.tripped or not frame.channel or self.ill is Ill.SILENT:
            return frame
        return None if self.ill is Ill.PINGS else _failed(frame)


def _failed(frame: Frame) -> Frame:
    body = decode_body(frame.kind, frame.body)
    answer: Body
    if frame.kind == FrameKind.BACKWARD:
        answer = Fault(0, 0, ErrorCode.INTERNAL)
    elif isinstance(body, Done):
        answer = Failed(body.lease, "", ErrorCode.INTERNAL, run=body.run)
    elif isinstance(body, Reduced):
        answer = Failed(body.attempt, "", ErrorCode.INTERNAL, run=body.run)
    elif frame.kind == FrameKind.STATUS:
        answer = Failed(0, "", ErrorCode.INTERNAL)
    else:
        return frame
    return Frame(KIND_OF[type(answer)], frame.channel, frame.seq, encode_body(answer))


class SabotagedStream(Stream):
    """What its peer writes passes a saboteur, frame by frame."""

    def __init__(self, inner: Stream, saboteur: Saboteur) -> None:
        self.peer = inner.peer
        self.protocol = inner.protocol
        self._inner = inner
        self._saboteur = saboteur
        self._out, self._in = FrameReader(), FrameReader()

    async def read_into(self, buffer: memoryview) -> int:
        count = await self._inner.read_into(buffer)
        for frame in self._in.feed(bytes(buffer[:count])):
            self._saboteur.note(frame)
        return count

    def write(self, buffers: Sequence[Buffer]) -> None:
        out: list[Buffer] = []
        for frame in self._out.feed(b"".join(buffers)):
            self._saboteur.note(frame)
            sent = self._saboteur.instead_of(frame)
            if sent is not None:
                head = pack_header(sent.kind, len(sent.body), len(sent.payload), sent.channel, sent.seq)
                out += [head + sent.body, sent.payload]
        self._inner.write(out)

    @property
    def unsent_bytes(self) -> int:
        return self._inner.unsent_bytes

    async def drain(self) -> None:
        await self._inner.drain()

    async def close(self) -> None:
        await self._inner.close()

    def abort(self) -> None:
        self._inner.abort()


class SabotagedNetwork(Network):
    """A peer of a FakeWorld whose streams of some protocols pass a saboteur."""

    def __init__(self, inner: FakeNetwork, world: FakeWorld, saboteur: Saboteur, protocols: Sequence[str]) -> None:
        self.peer_id = inner.peer_id
        self._inner = inner
        self._saboteur = saboteur
        self._protocols = protocols
        saboteur.on_silent = lambda: world.hang(inner.peer_id)

    @property
    def dht(self) -> Dht:
        return self._inner.dht

    def _pass(self, stream: Stream) -> Stream:
        return SabotagedStream(stream, self._saboteur) if stream.protocol in self._protocols else stream

    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float, addresses: Sequence[str] = ()) -> Stream:
        return self._pass(await self._inner.open(peer, protocol, timeout_s=timeout_s, addresses=addresses))

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        await self._inner.serve(protocol, lambda stream: handler(self._pass(stream)))

    async def addresses(self) -> list[str]:
        return await self._inner.addresses()

    async def connected(self) -> set[PeerId]:
        return await self._inner.connected()

    async def visitors(self) -> list[str]:
        return await self._inner.visitors()

    async def connect(self, addresses: Sequence[str], *, timeout_s: float) -> bool:
        return await self._inner.connect(addresses, timeout_s=timeout_s)

    async def close(self) -> None:
        await self._inner.close()


def wrapping(world: Callable[[], FakeWorld], ill: Mapping[int, Saboteur], protocol: str) -> Callable[..., Network]:
    """For `TrainingSwarm`: the peers of these numbers, in the order in which they come, are sabotaged."""
    number = iter(range(1 << 20))

    def wrap(network: FakeNetwork) -> Network:
        saboteur = ill.get(next(number))
        return network if saboteur is None else SabotagedNetwork(network, world(), saboteur, (protocol,))

    return wrap
