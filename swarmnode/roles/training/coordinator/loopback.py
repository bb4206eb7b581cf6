"""A conversation with oneself: the coordinator's own stage is spoken to as all others are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import KIND_OF, Body, End
from swarmnode.errors import PeerError
from swarmnode.net.interfaces import PeerId


class Loopback:
    """One end; `pair` makes both. Frames arrive in order, in a later turn of the loop, without payload."""

    rtt_s: float | None = 0.0

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.on_frame: Callable[[Frame, Body], None] = lambda _frame, _body: None
        self.on_lost: Callable[[PeerError], None] = lambda _error: None
        self.open = True
        self._other: Loopback = self

    def __repr__(self) -> str:
        return f"<Loopback of {self.peer} {'open' if self.open else 'closed'}>"

    @classmethod
    def pair(cls, peer: PeerId) -> tuple[Loopback, Loopback]:
        """Two ends of a new conversation."""
        here, there = cls(peer), cls(peer)
        here._other, there._other = there, here
        return here, there

    def send(self, body: Body) -> None:
        """Let the other end hear a body."""
        asyncio.get_running_loop().call_soon(self._other._hear, body)

    def close(self, last: Body | None = None) -> None:
        """Finish the conversation with `last` (END by default)."""
        if self.open:
            self.open = False
            self.send(last or End())

    def _hear(self, body: Body) -> None:
        if self.open:
            self.open = not isinstance(body, End)
            self.on_frame(Frame(KIND_OF[type(body)], 0, 0, b""), body)
