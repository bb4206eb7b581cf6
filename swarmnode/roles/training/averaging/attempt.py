"""Attempt: one attempt of an all-reduce, as one member runs it.

A round's vector is cut into parts, each owned by a contributor. Side by side, each at the pace of those who take it:

    contribute   this member's values of others' parts, to their owners
    settle       its own parts: added up in the order of the contributors, and sent to all members
    take         the settled parts of others

What a member holds beside the vectors is bounded by the windows (`partner.py`), whatever the vectors' length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from swarmnode.codec.averaging_messages import Part
from swarmnode.codec.training_fields import MAX_PULLED
from swarmnode.compute.training.averaging.parts import Contribution, Encoded, cut, longest_part
from swarmnode.compute.training.averaging.round import Round
from swarmnode.errors import ProtocolError
from swarmnode.net.deadlines import Deadline
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.roles.training.averaging.partner import AttemptId, PartChunk, Partner
from swarmnode.roles.training.averaging.progress import Patience
from swarmnode.roles.training.averaging.pulls import EarlyPulls

T = TypeVar("T")
Places = Sequence[tuple[int, slice]]
"""Parts by number, and which elements they are."""
Settled = asyncio.Queue[tuple[Part, Encoded]]

STILL = Deadline(floor_s=4.0, ceiling_s=20.0, slack=8.0)  # for a partner that neither does nor says anything
EXCUSE_S = STILL.floor_s / 4
EXCUSES = 6  # times as long for one that says that it waits itself: whom it waits for it finds before
UNKNOWN_RTT_S = 0.5
SLOWEST_BYTES_PER_S = 32 * 1024  # as for any payload (`net/heartbeat.py`)
RECEIVED_BYTES = 24 << 20  # chunks that were pulled from all partners together
WINDOW = 8  # chunks of each kind that one of them may have on the way: 1 Gbit/s at 60 ms
SETTLED_AHEAD = 2  # parts that wait for the slowest member


Heard = Callable[[PeerId, slice, Tensor], None]
"""Sees what a contributor has of a part that is settled here."""


@dataclass(frozen=True)
class Circle:
    """Who sums up a group's vector. `weights`: of the contributors, in their order; `shares`: how much of it each
    adds up. `robust`: none of them is to drag it away."""

    group: int
    members: tuple[PeerId, ...]
    weights: Mapping[PeerId, float]
    shares: tuple[int, ...]
    robust: bool = False
    heard: Heard | None = None


Call = Callable[[Callable[[], Any]], "asyncio.Future[Any]"]
"""Runs a function where the tensors are."""


class Attempt:
    """`circles`: all those with more than one member that `peer` is in. Used as a context, in which the vectors are summed."""

    def __init__(
        self,
        peer: PeerId,
        attempt: AttemptId,
        switchboard: Switchboard,
        call: Call,
        circles: Sequence[Circle],
        early: EarlyPulls,
    ) -> None:
        self.id = attempt
        self._peer = peer
        self._switchboard = switchboard
        self._call = call
        self._sources = {source for circle in circles for source in circle.weights} - {peer}
        self._longest = max((longest_part(len(circle.weights)) for circle in circles), default=1)
        members = {member for circle in circles for member in circle.members} - {peer}
        self.partners = {member: Partner(peer, member, attempt, partial(self._patience, member)) for member in members}
        for member, partner in self.partners.items():
            pull = early.take(member, attempt)
            if pull is not None:
                partner.pulled(*pull)
        self._tasks = Tasks(
            "all-reduce", on_crash=None
        )  # without excuses partners lose patience, and another attempt is made

    def __repr__(self) -> str:
        return f"<Attempt {self.id} with {list(self.partners.values())}>"

    @property
    def _chunk_bytes(self) -> int:
        return 4 * self._longest

    @property
    def window(self) -> int:
        """Chunks of each kind that each partner may have on the way to us."""
        return max(1, min(WINDOW, MAX_PULLED, RECEIVED_BYTES // (2 * self._chunk_bytes * max(1, len(self._sources)))))

    def _patience(self, peer: PeerId) -> Patience:
        """With a partner, whose chunks share its link with those of all others."""
        still_s = STILL.wait_s(rtt_s=self._switchboard.rtt_s(peer) or UNKNOWN_RTT_S)
        slowest_s = self._chunk_bytes * len(self.partners) / SLOWEST_BYTES_PER_S
        return Patience(still_s, EXCUSES * still_s + slowest_s)

    async def __aenter__(self) -> Attempt:
        self._tasks.spawn(self._excuse(), "excuses")
        try:
            await self._together(self.partners[peer].pull(self._switchboard, self.window) for peer in self._sources)
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        for partner in self.partners.values():
            partner.close(error)
        await self._tasks.close()

    async def _excuse(self) -> None:
        """Let all know that we are held up by others. It goes by way of the compute thread: if that stands still, so does this."""
        while True:
            await asyncio.sleep(EXCUSE_S)
            await self._call(lambda: None)
            for partner in self.partners.values():
                partner.excuse(self._waits_for())

    def _waits_for(self) -> PeerId:
        """Whom we have waited for the longest; empty where we do not wait."""
        waits = [(partner.progress.waiting_since_s, peer) for peer, partner in self.partners.items()]
        return min(((since_s, peer) for since_s, peer in waits if since_s is not None), default=(0.0, ""))[1]

    async def sum(self, circle: Circle, number: int, round_: Round) -> None:
        """Sum up a round's vector with the others of a circle. Raises PeerError naming who failed, ProtocolError."""
        owners = tuple(circle.weights)
        places: dict[PeerId, list[tuple[int, slice]]] = {owner: [] for owner in owners}
        for part, cut_out in enumerate(cut(len(round_), circle.shares)):
            places[owners[cut_out.owner]].append((part, cut_out.place))
        head = Part(circle.group, number, 0, False, (), self.id.run)
        jobs: list[Coroutine[Any, Any, None]] = []
        for owner, theirs in places.items():
            if owner == self._peer:
                jobs += self._settling(circle, round_, head, theirs)
            else:
                jobs.append(self._take(owner, round_, head, theirs))
                if self._peer in circle.weights:
                    jobs.append(self._contribute(owner, round_, head, theirs))
        await self._together(jobs)

    async def _contribute(self, owner: PeerId, round_: Round, head: Part, places: Places) -> None:
        for part, place in places:
            offer = await self._run(partial(round_.offer, place))
            await self.partners[owner].push(msgspec.structs.replace(head, part=part), offer)

    async def _take(self, owner: PeerId, round_: Round, head: Part, places: Places) -> None:
        partner = self.partners[owner]
        for part, place in places:
            chunk = await partner.next(msgspec.structs.replace(head, part=part, agreed=True))
            with _blaming(owner):
                await self._run(partial(round_.take, place, *chunk.encoded))
            partner.taken(agreed=True)

    def _settling(self, circle: Circle, round_: Round, head: Part, places: Places) -> list[Coroutine[Any, Any, None]]:
        """One job that adds up our own parts, and one for each other member that hears of them."""
        queues: dict[PeerId, Settled] = {
            peer: asyncio.Queue(SETTLED_AHEAD) for peer in circle.members if peer != self._peer
        }
        sending = [self._push_settled(peer, queue, len(places)) for peer, queue in queues.items()]
        return [self._settle(circle, round_, head, places, list(queues.values())), *sending]

    async def _settle(
        self, circle: Circle, round_: Round, head: Part, places: Places, queues: Sequence[Settled]
    ) -> None:
        others = [peer for peer in circle.weights if peer != self._peer]
        for part, place in places:
            due = msgspec.structs.replace(head, part=part)
            chunks = {peer: await self.partners[peer].next(due) for peer in others}
            settled = await self._run(partial(self._add_up, circle, round_, place, chunks))
            for peer in others:
                self.partners[peer].taken(agreed=False)
            for queue in queues:
                await queue.put((msgspec.structs.replace(due, agreed=True), settled))

    def _add_up(self, circle: Circle, round_: Round, place: slice, chunks: Mapping[PeerId, PartChunk]) -> Encoded:
        """Where the tensors are: the same bytes for all, ourselves included."""
        heard: list[Contribution] = []
        for peer, weight in circle.weights.items():
            with _blaming(peer):
                offer = round_.offer(place) if peer == self._peer else chunks[peer].encoded
                heard.append(round_.hear(place, weight, *offer))
            if circle.heard is not None:
                circle.heard(peer, place, heard[-1].values_N)
        settled = round_.settle(place, heard)
        round_.take(place, *settled)
        return settled

    async def _push_settled(self, peer: PeerId, queue: Settled, count: int) -> None:
        for _ in range(count):
            await self.partners[peer].push(*await queue.get())

    async def _run(self, function: Callable[[], T]) -> T:
        result: T = await self._call(function)
        return result

    async def _together(self, jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Run jobs side by side; the first error ends them all."""
        tasks = Tasks("all-reduce", on_crash=None)
        try:
            await asyncio.gather(*[tasks.spawn(job, "job", awaited=True) for job in jobs])
        finally:
            await tasks.close()


@contextmanager
def _blaming(peer: PeerId) -> Iterator[None]:
    """Whose fault it is, where what came breaks the rules."""
    try:
        yield
    except ProtocolError as error:
        error.peer = peer
        raise
