"""Following: whose word a stage follows, and until when. A coordinator that says nothing is gone, though its links may live."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swarmnode.codec.messages import Error
from swarmnode.codec.training_messages import Lead
from swarmnode.errors import ErrorCode, PeerError, PeerLost
from swarmnode.net.deadlines import Backoff
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Channel
from swarmnode.net.tasks import OnCrash, Tasks
from swarmnode.training.coordinator.answer_times import SILENCE_S, STALLED_S
from swarmnode.training.coordinator.worker_group import Line

log = logging.getLogger(__name__)

TICK_S = 0.5
IDLER_S, MOST_IDLER_S = 60.0, 3600.0  # for which who led and gave out no work is not followed again
MAX_CLAIMS = 64
CLAIM_S = 60.0  # for which a coordinator that is not in force may go on talking
MAX_TERM_JUMP = 1 << 32  # 65536 coordinators: one peer's word does not use all terms up


class Following:
    """`on_followed` hears of each coordinator that comes into force, `on_lost` when it is gone; without an error it let go."""

    def __init__(self, *, on_crash: OnCrash | None = None) -> None:
        self.term = 0
        self.key = b""  # of the seals of this term's leases
        self.coordinator: PeerId | None = None
        self.line: Line | None = None
        self.on_followed: Callable[[PeerId], None] = lambda _peer: None
        self.on_lost: Callable[[PeerId, PeerError | None], None] = lambda _peer, _error: None
        self._silent_ticks = 0
        self._deserters = Backoff(asyncio.get_running_loop().time)  # led, and then said nothing
        self._idlers = Backoff(
            asyncio.get_running_loop().time, first_s=IDLER_S, ceiling_s=MOST_IDLER_S, forget_s=2 * MOST_IDLER_S
        )
        self._tasks = Tasks("following", on_crash=on_crash)
        self._watch: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Following {self.coordinator or 'nobody'}, term {self.term}>"

    def accepts(self, line: Line, body: Lead) -> bool:
        """Follow the sender from now on, unless one of a newer term is in force or the term is out of all reason."""
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
        """The coordinator has said something."""
        self._silent_ticks = 0

    def lost(self, line: Line, error: PeerError | None) -> None:
        """A line was cut, or (no error) its other end let go."""
        if self.line is line:
            peer, self.coordinator, self.line = line.peer, None, None
            self.on_lost(peer, error)

    def desert(self) -> None:
        """The coordinator in force keeps talking and gives out no work: it is not followed for a while."""
        if self.line is not None:
            self._idlers.failed(self.line.peer)
            self._leave(self.line, f"gives out no work for {STALLED_S:.0f} s")

    def _leave(self, line: Line, fault: str) -> None:
        log.warning("coordinator %s %s", line.peer, fault)
        self.lost(line, PeerLost(f"coordinator {line.peer} {fault}", peer=line.peer))
        line.close()

    async def _watch_silence(self) -> None:
        """Counts ticks, not seconds: while this process is suspended nothing can be heard."""
        while True:
            await asyncio.sleep(TICK_S)
            self._silent_ticks += 1
            line = self.line
            if line is not None and self._silent_ticks * TICK_S >= SILENCE_S:
                self._deserters.failed(line.peer)
                self._leave(line, f"says nothing for {SILENCE_S:.0f} s")

    async def close(self) -> None:
        """Follow nobody any more: whoever's line ends now has not done it."""
        self.coordinator = self.line = None
        await self._tasks.close()


class LeadClaims:
    """Conversations in which peers claim to lead: besides the one in force one for each peer, MAX_CLAIMS in all, for a while."""

    def __init__(self, following: Following) -> None:
        self._following = following
        self._channels: dict[Channel, None] = {}  # the oldest first

    def __repr__(self) -> str:
        return f"<LeadClaims, {len(self._channels)} open>"

    def add(self, channel: Channel) -> None:
        """Keep a conversation, whose first LEAD has been answered, and close what is over the bounds."""
        self._channels = {kept: None for kept in self._channels if kept.open}
        idle = [kept for kept in self._channels if kept is not self._following.line]
        of_peer = [kept for kept in idle if kept.peer == channel.peer]
        oldest = idle[: max(0, len(idle) + 1 - MAX_CLAIMS)]
        for kept in {*of_peer, *oldest}:
            self._close(kept)
        self._channels[channel] = None
        asyncio.get_running_loop().call_later(CLAIM_S, self._expire, channel)

    def _expire(self, channel: Channel) -> None:
        """One in force is looked at again later: it may be displaced."""
        if channel.open and channel is self._following.line:
            asyncio.get_running_loop().call_later(CLAIM_S, self._expire, channel)
        else:
            self._close(channel)

    def _close(self, channel: Channel) -> None:
        if self._channels.pop(channel, channel) is None and channel.open:
            channel.close(Error(ErrorCode.STALE))
