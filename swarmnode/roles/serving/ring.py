"""Ring: the way from the last hop of a session back to the first one, by which drawn tokens become inputs."""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Attach, Body, Open
from swarmnode.errors import NetworkDown, PeerError
from swarmnode.net.links.switchboard import Channel, Switchboard


class Ring:
    """Of one session at its first hop: for each epoch a channel to the last one. `on_frame` hears all frames of it; `in_force`
    tells whether the session goes on by an OPEN."""

    def __init__(
        self, switchboard: Switchboard, on_frame: Callable[[Frame, Body], None], in_force: Callable[[Open], bool]
    ) -> None:
        self._switchboard = switchboard
        self._on_frame = on_frame
        self._in_force = in_force
        self.channel: Channel | None = None

    def __repr__(self) -> str:
        return f"<Ring {'open' if self.channel is None else f'by {self.channel.peer}'}>"

    def unbind(self) -> None:
        """Leave the last hop. Safe to call twice."""
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()

    async def bind(
        self, opened: Open, start: Callable[[], int], on_fault: Callable[[PeerError | NetworkDown], None]
    ) -> None:
        """Subscribe to the outputs of an epoch, from where the session is by then, unless the epoch is over. `on_fault` hears that
        the last hop is not to be had, or lost."""
        if not self._in_force(opened):
            return
        try:
            channel = await self._switchboard.call(opened.route[-1].peer, self._on_frame, on_fault)
            if not self._in_force(opened):
                channel.close()
                return
            self.channel = channel
            channel.send(Attach(opened.session, opened.epoch, start=start()))
        except (PeerError, NetworkDown) as error:
            if self._in_force(opened):
                on_fault(error)
