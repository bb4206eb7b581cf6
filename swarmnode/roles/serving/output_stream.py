"""Output stream: what a session's last hop brings forth, and who wants it."""

from __future__ import annotations

from swarmnode.codec.messages import Body, Output
from swarmnode.errors import PeerLost
from swarmnode.net.interfaces import Buffer
from swarmnode.net.links.switchboard import Channel


class OutputStream:
    """Outputs by position, kept for subscribers that come later."""

    def __init__(self) -> None:
        self._outputs: dict[int, tuple[Output, tuple[Buffer, ...]]] = {}
        self._subscribers: list[Channel] = []

    def __repr__(self) -> str:
        return f"<OutputStream of {len(self._outputs)} outputs to {len(self._subscribers)} subscribers>"

    def held(self, position: int) -> Output | None:
        """The output at a position, if there is one."""
        output, _ = self._outputs.get(position, (None, ()))
        return output

    def drawn(self) -> tuple[int, tuple[int, ...]]:
        """The tokens of one row that were told last, none left out, and the position of the first one."""
        position, ids = max(self._outputs, default=0), list[int]()
        while (output := self.held(position)) is not None and output.ids:
            ids.append(output.ids[0])
            position -= 1
        return position + 1, tuple(reversed(ids))

    def publish(self, position: int, output: Output, payload: tuple[Buffer, ...], *, at_once: bool = False) -> None:
        """Send an output to all subscribers, `at_once` where nothing goes with it. One whose link is cut is none any more."""
        self._outputs[position] = (output, payload)
        for channel in list(self._subscribers):
            try:
                channel.send(output, seq=position, payload=payload, at_once=at_once)
            except PeerLost:
                self._subscribers.remove(channel)

    def forget(self) -> None:
        """Nobody will ask again for what there was so far."""
        self._outputs.clear()

    def attach(self, channel: Channel, start: int) -> None:
        """Send the outputs from position `start` on to a channel, the ones that exist and the ones to come."""
        self._subscribers.append(channel)
        for position, (output, payload) in sorted(self._outputs.items()):
            if position >= start:
                channel.send(output, seq=position, payload=payload)

    def detach(self, channel: Channel) -> None:
        """It wants no more. Safe to call twice."""
        if channel in self._subscribers:
            self._subscribers.remove(channel)

    def close(self, last: Body | None = None) -> None:
        """End all subscriptions with `last` (END by default)."""
        subscribers, self._subscribers = self._subscribers, []
        for channel in subscribers:
            channel.close(last)
