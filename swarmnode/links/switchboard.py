"""Conversations over few long-lived links: a switchboard keeps one outgoing link per peer, and a channel number tells conversations
apart.

The opener of a link numbers its channels upwards. So a frame on a known number without a channel belongs to a conversation that is
over (an older epoch, for example), and is dropped; a higher number begins a new conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import End, Hello
from swarmnode.errors import NetworkDown, PeerError, PeerLost
from swarmnode.ledger import MemoryLedger
from swarmnode.links.link import Link
from swarmnode.links.link_config import LinkConfig
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.interfaces import Buffer, Network, PeerId, Stream
from swarmnode.net.tasks import Tasks

OnFrame = Callable[[Frame, Body], None]
OnLost = Callable[[PeerError], None]


class Channel:
    """Conversation on a link. The callbacks `on_frame` and `on_lost` may be replaced while it lives; both are called on the event
    loop."""

    __slots__ = ("_line", "claimant", "number", "on_frame", "on_lost", "peer")

    def __init__(self, line: _Line, number: int, on_frame: OnFrame, on_lost: OnLost) -> None:
        self._line = line
        self.peer: PeerId = line.link.peer  # at the other end
        self.claimant: Claimant = line.link.claimant  # for limits
        self.number = number
        self.on_frame = on_frame
        self.on_lost = on_lost

    def __repr__(self) -> str:
        return f"<Channel {self.number} to {self.peer} {'open' if self.open else 'closed'}>"

    @property
    def rtt_s(self) -> float | None:
        """Round trip of the link in seconds; None before the first measurement."""
        return self._line.link.rtt_s

    @property
    def bandwidth_bps(self) -> float | None:
        """Rate of large frames to the peer in bits/s, as it measured them; None if unknown."""
        return self._line.link.bandwidth_bps

    @property
    def received_bps(self) -> float | None:
        """Rate of large frames from the peer in bits/s; None if unknown."""
        return self._line.link.received_bps

    @property
    def moving(self) -> bool:
        """Whether a large payload is on its way on the link, in either direction."""
        return self._line.link.moving

    @property
    def open(self) -> bool:
        """Whether frames may still be sent."""
        return self._line.channels.get(self.number) is self and not self._line.link.closed

    def send(self, body: Body, *, seq: int = 0, payload: Sequence[Buffer] = (), at_once: bool = False) -> None:
        """Queue a frame; `at_once` also writes the queue to the network. Raises PeerLost if the link is closed."""
        self._line.link.send(body, channel=self.number, seq=seq, payload=payload, at_once=at_once)

    async def drain(self) -> None:
        """Wait until the link's send queue is short. Raises PeerLost if the link died meanwhile."""
        await self._line.link.drain()

    def close(self, last: Body | None = None) -> None:
        """Finish the conversation with `last` (END by default). Frames that arrive later are dropped."""
        if self._line.channels.pop(self.number, None) is not self:
            return
        self._line.update_busy()
        if not self._line.link.closed:
            self.send(last or End())


class _Line:
    """A link and its channels."""

    def __init__(self, link: Link, accept: Callable[[Channel, Frame, Body], None] | None) -> None:
        self.link = link
        self.channels: dict[int, Channel] = {}
        self._accept = accept
        self._highest = 0

    def new_channel(self, on_frame: OnFrame, on_lost: OnLost) -> Channel:
        self._highest += 1
        return self._register(Channel(self, self._highest, on_frame, on_lost))

    def _register(self, channel: Channel) -> Channel:
        self.channels[channel.number] = channel
        self.update_busy()
        return channel

    def update_busy(self) -> None:
        # Conversations expect answers: with one open, a silent peer must be noticed soon.
        self.link.busy = bool(self.channels)

    def on_frame(self, frame: Frame, body: Body) -> None:
        channel = self.channels.get(frame.channel)
        if channel is not None:
            if isinstance(body, End):
                self.channels.pop(frame.channel)
                self.update_busy()
            channel.on_frame(frame, body)
        elif self._accept is not None and frame.channel > self._highest:
            self._highest = frame.channel
            channel = self._register(Channel(self, frame.channel, lambda _frame, _body: None, lambda _error: None))
            self._accept(channel, frame, body)

    def lost(self, error: PeerError) -> None:
        channels, self.channels = self.channels, {}
        for channel in channels.values():
            channel.on_lost(error)


class Switchboard:
    """All links of one protocol: outgoing links, one per peer, opened at the first call; and incoming links, served.

    `accept(channel, frame, body)` is called for the first frame of every conversation that a peer begins; it sets the channel's
    callbacks. `on_peer_lost(error)` is called for every link that did not end in order.
    """

    def __init__(
        self,
        network: Network,
        protocol: str,
        hello: Hello,
        config: LinkConfig,
        *,
        accept: Callable[[Channel, Frame, Body], None] | None = None,
        on_peer_lost: Callable[[PeerError], None] = lambda _error: None,
    ) -> None:
        self._network = network
        self._protocol = protocol
        self._hello = hello
        self._config = config
        self._accept = accept
        self._on_peer_lost = on_peer_lost
        self._outgoing: dict[PeerId, _Line] = {}
        self._incoming: dict[_Line, None] = {}  # the oldest first
        self._dialing: dict[PeerId, asyncio.Task[_Line]] = {}
        self.peer_id = network.peer_id
        self._tasks = Tasks(f"links of {protocol}", on_crash=config.supervisor.ends_conversation)
        self._closed = False

    def __repr__(self) -> str:
        return f"<Switchboard {self._protocol} outgoing={len(self._outgoing)} incoming={len(self._incoming)}>"

    @property
    def ledger(self) -> MemoryLedger:
        """Account of the memory that messages of these links take."""
        return self._config.ledger

    async def start(self) -> None:
        """Start to accept links from other peers."""
        await self._network.serve(self._protocol, self._serve)

    async def call(self, peer: PeerId, on_frame: OnFrame, on_lost: OnLost) -> Channel:
        """Begin a conversation with a peer over the one link to it, dialling if needed. Raises PeerLost, PeerRefused, ProtocolError
        or NetworkDown.

        The caller must send the first frame before it awaits anything else: channel numbers must arrive in order.
        """
        line = self._outgoing.get(peer)
        if line is None or line.link.closed:
            line = await self._dial(peer)
        return line.new_channel(on_frame, on_lost)

    def check(self, peer: PeerId) -> None:
        """Dial a peer that others say is lost, unless there is a link to it. `on_peer_lost` is called later if it is lost."""
        line = self._outgoing.get(peer)
        if not self._closed and peer not in self._dialing and (line is None or line.link.closed):
            self._tasks.spawn(self._check(peer), f"check {peer}")

    async def _check(self, peer: PeerId) -> None:
        try:
            await self._dial(peer)
        except PeerError as error:
            self._on_peer_lost(error)
        except NetworkDown:
            return  # this machine is cut off: it cannot tell

    def rtt_s(self, peer: PeerId) -> float | None:
        """Return the measured round trip to a peer in seconds; None if there is no outgoing link or no measurement."""
        line = self._outgoing.get(peer)
        return None if line is None else line.link.rtt_s

    def bandwidth_bps(self, peer: PeerId) -> float | None:
        """Return the rate of large frames to a peer in bits/s, as it measured them; None if unknown."""
        line = self._outgoing.get(peer)
        return None if line is None else line.link.bandwidth_bps

    def received_bps(self, peer: PeerId) -> float | None:
        """Return the rate of a peer's large frames, received as answers, in bits/s; None if unknown."""
        line = self._outgoing.get(peer)
        return None if line is None else line.link.received_bps

    async def _dial(self, peer: PeerId) -> _Line:
        # Shielded: a caller that gives up must not end the dialling for another.
        if self._closed:
            raise NetworkDown("this node is closing its links")
        task = self._dialing.get(peer)
        if task is None:
            task = self._dialing[peer] = self._tasks.spawn(self._connect(peer), f"dial {peer}", awaited=True)
            task.add_done_callback(lambda _task: self._dialing.pop(peer, None))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise NetworkDown("this node is closing its links") from None
            raise

    async def _connect(self, peer: PeerId) -> _Line:
        link = await Link.connect(self._network, peer, self._protocol, self._hello, config=self._config)
        line = self._outgoing[peer] = _Line(link, None)
        self._tasks.spawn(self._run(line), f"link to {peer}")
        return line

    async def _serve(self, stream: Stream) -> None:
        """Serve an incoming link. None may stay open after `close`, since another switchboard may serve the protocol later."""
        if self._closed:
            stream.abort()
            return
        link = await Link.accept(stream, self._hello, config=self._config)
        if self._closed:
            await link.close()
            return
        line = _Line(link, self._accept)
        self._incoming[line] = None
        await self._run(line)

    async def _run(self, line: _Line) -> None:
        error: PeerError = PeerLost(f"peer {line.link.peer} closed the link", peer=line.link.peer)
        try:
            await line.link.run(line.on_frame)
        except PeerError as failure:
            error = failure
            self._on_peer_lost(failure)
        finally:
            if self._outgoing.get(line.link.peer) is line:
                del self._outgoing[line.link.peer]
            self._incoming.pop(line, None)
            line.lost(error)

    async def close(self) -> None:
        """End every link in order; no link can be opened any more."""
        self._closed = True
        await asyncio.gather(*(line.link.close() for line in (*self._outgoing.values(), *self._incoming)))
        await self._tasks.close()
