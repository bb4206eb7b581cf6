"""Worker group: the stages that a coordinator speaks to."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, End, Error
from swarmnode.errors import PeerError, PeerLost, SwarmnodeError
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.roles.training.coordinator.strikes import Strikes
from swarmnode.roles.training.coordinator.worker_handle import Line, WorkerHandle, WorkerState

log = logging.getLogger(__name__)

WITHIN_MOMENTS = (WorkerState.USABLE, WorkerState.COMING, WorkerState.DISCARDING)  # take part, or soon will

Dial = Callable[[PeerId, Callable[[Frame, Body], None], Callable[[PeerError], None]], Awaitable[Line]]


class WorkerGroup:
    """`dial` opens a conversation with a stage. `joined` is called for each that answers the call, `heard` for what it says,
    `lost` once it is gone, with the reason. Who failed lately (`strikes`) is called again after a pause that grows."""

    def __init__(
        self,
        dial: Dial,
        strikes: Strikes,
        *,
        clock: Callable[[], float],
        joined: Callable[[WorkerHandle], None],
        heard: Callable[[WorkerHandle, Body], None],
        lost: Callable[[PeerId, str], None],
    ) -> None:
        self.members: dict[PeerId, WorkerHandle] = {}
        self._dial = dial
        self._strikes = strikes
        self._clock = clock
        self._joined = joined
        self._heard = heard
        self._lost = lost
        self._dialing: set[PeerId] = set()
        self._tasks = Tasks("worker_group", on_crash=None)  # who is not reached is called again

    def __repr__(self) -> str:
        return f"<WorkerGroup of {len(self.members)} stages, {len(self._dialing)} more called>"

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(list(self.members.values()))

    async def close(self) -> None:
        """Let go of everybody."""
        await self._tasks.close()
        for member in self:
            member.line.close()

    def enlist(self, peers: Iterable[PeerId]) -> None:
        """These stages are there: speak to those that are new."""
        for peer in peers:
            if peer not in self.members and peer not in self._dialing and not self._strikes.rests(peer):
                self._dialing.add(peer)
                self._tasks.spawn(self._call(peer), f"call {peer}")

    async def _call(self, peer: PeerId) -> None:
        try:
            line = await self._dial(
                peer, lambda _frame, body: self._hear(peer, body), lambda error: self._lose(peer, error)
            )
        except SwarmnodeError as error:
            log.info("stage %s cannot be reached: %s", peer, error)
            self._strikes.strike(peer)
            return
        finally:
            self._dialing.discard(peer)
        member = self.members[peer] = WorkerHandle(peer, line, self._clock)
        self._joined(member)

    def _hear(self, peer: PeerId, body: Body) -> None:
        if isinstance(body, End | Error):
            self._lose(peer)
        elif peer in self.members:
            self._heard(self.members[peer], body)

    def _lose(self, peer: PeerId, error: PeerError | None = None) -> None:
        member = self.members.pop(peer, None)
        if member is not None:
            reason = str(error or "it let go")
            log.info("stage %s is lost: %s", peer, reason)
            self._strikes.strike(peer)
            member.line.close()
            self._lost(peer, reason)

    def dismiss(self, peer: PeerId, reason: str) -> None:
        """Go on without a stage that does not do its part."""
        self._lose(peer, PeerLost(reason, peer=peer))

    @property
    def all_answered(self) -> bool:
        """Whether there is anybody, and all who were called or asked have said what they hold."""
        return bool(self.members) and not self._dialing and all(member.status is not None for member in self)

    def usable(self) -> list[WorkerHandle]:
        """Who can be given work."""
        return [member for member in self if member.state is WorkerState.USABLE]

    def hearing(self, step: int) -> list[WorkerHandle]:
        """Who hears the all-reduce of a step."""
        return [member for member in self if member.hears(step)]

    def answered(self) -> list[WorkerHandle]:
        """Those that have said what they hold."""
        return [member for member in self if member.status is not None]

    def can_spare(self, peer: PeerId) -> bool:
        """Whether others take part who hold all units that this one holds."""
        held = {unit for member in self.usable() if member.peer != peer for unit in range(*member.span)}
        return peer in self.members and held.issuperset(range(*self.members[peer].span))

    def uncovered(self, units: int) -> tuple[int, ...]:
        """Units that nobody holds who takes part or soon will."""
        able = [member for member in self if member.state in WITHIN_MOMENTS]
        held = {unit for member in able for unit in range(*member.span)}
        return tuple(unit for unit in range(units) if unit not in held)
