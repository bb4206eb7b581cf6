"""Pulls: what replicas ask for before our own REDUCE is here. It holds no chunks: who is early waits."""

from __future__ import annotations

from typing import NamedTuple

from swarmnode.codec.averaging_messages import Pull, Waiting
from swarmnode.codec.messages import Body, Error
from swarmnode.codec.training_fields import MAX_MEMBERS
from swarmnode.errors import ErrorCode
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Channel
from swarmnode.roles.training.averaging.partner import AttemptId, attempt_of

MAX_EARLY = 2 * MAX_MEMBERS  # of strangers, too: nobody knows yet who the members are


class _EarlyPull(NamedTuple):
    channel: Channel
    body: Pull
    attempt: AttemptId


class EarlyPulls:
    """The newest conversation of each peer, oldest first; the oldest go where there are too many."""

    def __init__(self) -> None:
        self._pulls: dict[PeerId, _EarlyPull] = {}

    def __repr__(self) -> str:
        return f"<EarlyPulls of {len(self._pulls)} peers>"

    def __len__(self) -> int:
        return len(self._pulls)

    def keep(self, channel: Channel, body: Pull) -> None:
        """Somebody asks for what is not begun here."""
        known = self._pulls.pop(channel.peer, None)
        if known is not None:
            known.channel.close(Error(ErrorCode.STALE))
        if len(self._pulls) >= MAX_EARLY:
            self._pulls.pop(next(iter(self._pulls))).channel.close(Error(ErrorCode.BUSY))
        self._pulls[channel.peer] = pull = _EarlyPull(channel, body, attempt_of(body))
        channel.on_frame = lambda _frame, body: self._hear(pull, body)
        channel.on_lost = lambda _error: self._forget(pull)

    def take(self, peer: PeerId, attempt: AttemptId) -> tuple[Channel, Pull] | None:
        """The conversation of a member of an attempt that begins, and what it asks for."""
        pull = self._pulls.get(peer)
        if pull is None or pull.attempt != attempt:
            return None
        del self._pulls[peer]
        return pull.channel, pull.body

    def drop_until(self, attempt: AttemptId) -> None:
        """Attempts up to this one are begun, or over: nothing of them is early."""
        for peer, pull in list(self._pulls.items()):
            if pull.attempt <= attempt:
                del self._pulls[peer]
                pull.channel.close(Error(ErrorCode.STALE))

    def _hear(self, pull: _EarlyPull, body: Body) -> None:
        """There is nothing to be said before the first parts have come, but that it waits."""
        if not isinstance(body, Waiting):
            self._forget(pull)
            pull.channel.close(Error(ErrorCode.MALFORMED))

    def _forget(self, pull: _EarlyPull) -> None:
        if self._pulls.get(pull.channel.peer) is pull:
            del self._pulls[pull.channel.peer]
