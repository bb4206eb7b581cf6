"""Following: the coordinator that a stage follows. A coordinator that falls silent counts as lost, even if its link is alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swarmnode.codec.messages import Error
from swarmnode.codec.training_messages import Lead
from swarmnode.errors import ErrorCode, PeerError, PeerLost
from swarmnode.links.switchboard import Channel
from swarmnode.net.deadlines import Backoff
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import OnCrash, Tasks
from swarmnode.training.coordinator.timeouts import SILENCE_S, STALLED_S
from swarmnode.training.coordinator.worker_group import Line

log = logging.getLogger(__name__)

TICK_S = 0.5
IDLER_S, MOST_IDLER_S = 60.0, 3600.0  # pause before a coordinator that gave out no work is followed again
MAX_CLAIMS = 64
CLAIM_S = 60.0  # longest conversation of a coordinator that is not in force
MAX_TERM_JUMP = 1 << 32  # 65536 coordinators: one peer's word must not use up all terms


class Following:
    """The stage's coordinator and term. `on_followed` is called with each coordinator that comes into force. `on_lost` is called
    when a coordinator is gone, with the error, or with None if it ended the conversation."""

    def __init__(self, *, on_crash: OnCrash | None = None) -> None:
        self.term = 0
        self.key = b""  # of the seals of this term's leases
        self.coordinator: PeerId | None = None
        self.line: Line | None = None
        self.on_followed: Callable[[PeerId], None] = lambda _peer: None
        self.on_lost: Callable[[PeerId, PeerError | None], None] = lambda _peer, _error: None
        self._silent_ticks = 0
        self._deserters = Backoff(asyncio.get_running_loop().time)  # coordinators that fell silent
        self._idlers = Backoff(
            asyncio.get_running_loop().time, first_s=IDLER_S, ceiling_s=MOST_IDLER_S, forget_s=2 * MOST_IDLER_S
        )
        self._tasks = Tasks("following", on_crash=on_crash)
        self._watch: asyncio.Task[None] | None = None

    def accepts(self, line: Line, body: Lead) -> bool:
        """Follow the sender of a LEAD and return True, or return False if it must not be followed.

        It must not if its term is lower than the current one or far too high, if another coordinator has the same term, or
        if the sender fell silent or idled lately.
        """
        jumps = self.term > 0 and body.term - self.term > MAX_TERM_JUMP
        rivals = body.term == self.term and self.coordinator not in (None, line.peer)
        rests = any(backoff.pause_s(line.peer) for backoff in (self._deserters, self._idlers))
        if body.term < self.term or rivals or jumps or rests:
            return False
        self.term, self.key, self.coordinator, self.line = body.term, body.key, line.peer, line
        self.heard()
        if self._watch is None:
            self._watch = self._tasks.spawn(self._watch_silence(), "silence")
        self.on_followed(line.peer)
        return True

    def heard(self) -> None:
        """Record that the coordinator has sent a message."""
        self._silent_ticks = 0

    def lost(self, line: Line, error: PeerError | None) -> None:
        """Note that the line was cut, or that its other end closed it (`error` is None). Ignores lines of coordinators that
        are not in force."""
        if self.line is line:
            peer, self.coordinator, self.line = line.peer, None, None
            self.on_lost(peer, error)

    def desert(self) -> None:
        """Leave the coordinator in force, which gives out no work, and do not follow it again for a while."""
        if self.line is not None:
            self._idlers.failed(self.line.peer)
            self._leave(self.line, f"gives out no work for {STALLED_S:.0f} s")

    def _leave(self, line: Line, fault: str) -> None:
        log.warning("coordinator %s %s", line.peer, fault)
        self.lost(line, PeerLost(f"coordinator {line.peer} {fault}", peer=line.peer))
        line.close()

    async def _watch_silence(self) -> None:
        """Leave a coordinator that is silent for SILENCE_S. It counts ticks, not seconds, since a suspended process hears
        nothing."""
        while True:
            await asyncio.sleep(TICK_S)
            self._silent_ticks += 1
            line = self.line
            if line is not None and self._silent_ticks * TICK_S >= SILENCE_S:
                self._deserters.failed(line.peer)
                self._leave(line, f"says nothing for {SILENCE_S:.0f} s")

    async def close(self) -> None:
        """Stop following. The coordinator whose line ends now is not blamed."""
        self.coordinator = self.line = None
        await self._tasks.close()


class LeadClaims:
    """Open conversations of peers that claim to lead the training: that of the coordinator which is followed, and at most
    MAX_CLAIMS others, one for each peer. Each of the others is kept for CLAIM_S seconds."""

    def __init__(self, following: Following) -> None:
        self._following = following
        self._channels: dict[Channel, None] = {}  # oldest first

    def add(self, channel: Channel) -> None:
        """Keep a conversation whose first LEAD has been answered, and close those beyond the limits."""
        self._channels = {kept: None for kept in self._channels if kept.open}
        idle = [kept for kept in self._channels if kept is not self._following.line]
        of_peer = [kept for kept in idle if kept.peer == channel.peer]
        oldest = idle[: max(0, len(idle) + 1 - MAX_CLAIMS)]
        for kept in {*of_peer, *oldest}:
            self._close(kept)
        self._channels[channel] = None
        asyncio.get_running_loop().call_later(CLAIM_S, self._expire, channel)

    def _expire(self, channel: Channel) -> None:
        """Close a conversation after its time. That of the coordinator which is followed stays, and is looked at again after
        CLAIM_S seconds."""
        if channel.open and channel is self._following.line:
            asyncio.get_running_loop().call_later(CLAIM_S, self._expire, channel)
        else:
            self._close(channel)

    def _close(self, channel: Channel) -> None:
        if self._channels.pop(channel, channel) is None and channel.open:
            channel.close(Error(ErrorCode.STALE))
