"""Ring: the way from the last hop of a session back to the first one, by which drawn tokens become inputs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Attach, Body, Open
from swarmnode.errors import NetworkDown, PeerError
from swarmnode.net.links.switchboard import Channel, Switchboard


class Ring:
    """Of one session at its first hop: for each epoch a channel to the last one. `on_frame` hears all frames of it."""

    def __init__(self, switchboard: Switchboard, on_frame: Callable[[Frame, Body], None]) -> None:
        self._switchboard = switchboard
        self._on_frame = on_frame
        self._opened: Open | None = None  # in force
        self.channel: Channel | None = None

    def __repr__(self) -> str:
        return f"<Ring {'open' if self.channel is None else f'by {self.channel.peer}'}>"

    def unbind(self) -> None:
        """Leave the last hop, and give up a `bind` that is under way. Safe to call twice."""
        channel, self.channel, self._opened = self.channel, None, None
        if channel is not None:
            channel.close()

    def bind(
        self, opened: Open, start: Callable[[], int], on_fault: Callable[[PeerError | NetworkDown], None]
    ) -> Coroutine[Any, Any, None]:
        """Subscribe to the outputs of an epoch, from where the session is by then; nothing where it was unbound before that.
        `on_fault` hears that the last hop is not to be had, or lost."""
        self._opened = opened
        return self._bind(opened, start, on_fault)

    async def _bind(
        self, opened: Open, start: Callable[[], int], on_fault: Callable[[PeerError | NetworkDown], None]
    ) -> None:
        if opened is not self._opened:
            return
        try:
            channel = await self._switchboard.call(opened.route[-1].peer, self._on_frame, on_fault)
            if opened is not self._opened:
                channel.close()
                return
            self.channel = channel
            channel.send(Attach(opened.session, opened.epoch, start=start()))
        except (PeerError, NetworkDown) as error:
            if opened is self._opened:
                on_fault(error)
