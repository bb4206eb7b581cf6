"""Placement of a node: the layers that it takes when it joins, by the rule or by a plan, and the reasons to move."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace

from swarmnode.counting import layers
from swarmnode.decisions import Topic
from swarmnode.net.clock import Backoff
from swarmnode.peer.host import Host
from swarmnode.plan.cost import BYTES_PER_HIDDEN
from swarmnode.plan.offline.planner_files import PlanFile
from swarmnode.plan.spans.span_placement import (
    BY_THROUGHPUT,
    Hysteresis,
    Joiner,
    Move,
    MovePolicy,
    PlacementRule,
    gaps,
    grounds,
)
from swarmnode.plan.view import Span, View, view_of
from swarmnode.swarm.records.announcement import Place, Section, State
from swarmnode.swarm.records.manifest import TRAIN

STANDS_BY = "stands by, and holds no layers"
SEARCHED_GAPS = 8  # units whose holders are searched in the table before a move that would fill them
COMING_S = 600.0  # how long a node waits for peers of its plan that never came; then they count as gone
HOLDING = (State.LOADING, State.READY)


class PlannedPlace:
    """The place of one node in a plan, from when it joins; `span` is empty if the plan gives it no layers.

    A plan is made for all of its peers. While all of them are at their planned places or still coming, each stays, however much
    better another order may look with half of them here. Once a peer has gone, or is elsewhere, all follow the usual rule.
    """

    def __init__(self, plan: PlanFile, host: Host) -> None:
        assert host.swarm.manifest is not None
        units = host.swarm.manifest.model.units
        self.span = plan.span_of(host.peer_id, units)
        planned = zip(plan.peers, plan.spans(len(plan.peers), units), strict=True)
        self._spans = {peer: span for peer, span in planned if span.units}
        self._came: set[str] = set()
        self._host = host
        self._joined_s = host.clock.monotonic()

    def holds(self) -> bool:
        """Return whether the node stays where the plan puts it."""
        if not self.span.units:
            return False
        announced = self._host.directory.peers()
        here = {peer: one for peer, one in announced.items() if peer in self._spans and one.life in HOLDING}
        self._came |= here.keys()
        comes = self._host.clock.monotonic() - self._joined_s < COMING_S
        missing = (self._came if comes else self._spans.keys()) - here.keys()
        return not missing and all(tuple(one.span) == self._spans[peer] for peer, one in here.items())


@dataclass(frozen=True)
class PlacementConfig:
    """Settings of a node's choice of layers: waiting times and intervals in seconds, and the rule for moves."""

    settle_s: float = 1.0  # how long a claim must stand before it is taken, so that joiners see one another
    max_settle_s: float = 6.0
    claim_interval_s: float = (
        0.2  # interval between two looks at others' claims in a swarm of up to `claim_crowd` peers
    )
    claim_crowd: int = 5  # a larger swarm looks less often in proportion, so that looks do not fill its time
    move_interval_s: float = 1.0  # shortest interval between two looks for a better place
    calm_interval_s: float = 5.0  # longest one, while nothing changes
    first_pause_s: float = 30.0  # after a move that disturbs others; doubles with each further one
    longest_pause_s: float = 600.0  # links measured meanwhile are busy with the consequences of the move
    move_policy: MovePolicy = field(default_factory=MovePolicy)


def endless() -> float:
    """Return infinity: the default for work without a known end, in seconds."""
    return math.inf


async def at_once() -> None:
    """Return at once: the default for a node without work that a move would interrupt."""


@dataclass(frozen=True)
class _Wish:
    """Wish of a node to move to other layers, with the monotonic time at which it arose."""

    move: Move
    since_s: float


class Placement:
    """Placement decisions of one node, from the directory alone. `capacity_units` is the number of layers that fit into its
    memory, `room` what else `swarmnode why` says of them."""

    def __init__(
        self,
        host: Host,
        capacity_units: int,
        config: PlacementConfig,
        rule: PlacementRule = BY_THROUGHPUT,
        *,
        room: str = "",
    ) -> None:
        self.config = config
        self._rule = rule
        self._host = host
        self._capacity_units, self._room = capacity_units, room
        self._clock = host.clock.monotonic
        self._hysteresis = Hysteresis()
        self._wish: _Wish | None = None
        self._move_s = config.move_policy.move_s
        self._leaving_s: float | None = None
        self._pauses = Backoff(
            self._clock,
            first_s=config.first_pause_s,
            ceiling_s=config.longest_pause_s,
            forget_s=config.move_policy.stay_s,
        )
        self._rest_s = endless

    async def claim(self, *introduction: Section) -> Span:
        """Claim a span in the announcement, look at the others' claims, and claim again until the claim has stood for `settle_s`
        seconds; return it.

        Gives up changing it after `max_settle_s` seconds. The span is empty if the node should stand by.
        """
        directory = self._host.directory
        claim = Span(0, self._capacity_units)
        directory.announce(Place(state=State.JOINING, span=(claim.start, claim.end)), *introduction)
        give_up_s = self._clock() + self.config.max_settle_s
        settled_s = self._clock() + self.config.settle_s
        while self._clock() < min(settled_s, give_up_s):
            look_s = self.config.claim_interval_s * max(1.0, directory.crowd / self.config.claim_crowd)
            await asyncio.sleep(min(look_s, self.config.settle_s))
            await directory.refresh()
            choice = await asyncio.to_thread(self._rule.choose, self._view(), self._joiner())
            if choice != claim:
                claim = choice
                directory.announce(Place(span=(claim.start, claim.end)))
                settled_s = self._clock() + self.config.settle_s
        view = self._view()
        room = f"its memory holds {self._capacity_units} of {view.units} layers{self._room}"
        self._record(view, f"takes {layers(*claim)}" if claim.units else STANDS_BY, claim, room)
        return claim

    async def reason_to_move(
        self,
        bound: Callable[[], bool],
        news: Callable[[], Iterable[Section]],
        rest_s: Callable[[], float] = endless,
        settled: Callable[[], Awaitable[None]] = at_once,
    ) -> Move:
        """Wait until a move pays and it is this node's turn, and return the move. While `bound` returns true the node stays.

        Args:
            bound: Whether the node must stay.
            news: The sections of the node's announcement about its work, read at each look.
            rest_s: The seconds that the work still takes.
            settled: Waits for a moment at which the work may be left; not used if the move fills a gap.
        """
        self._wish = None
        self._rest_s = rest_s
        while True:
            revision = self._host.directory.revision
            self._host.directory.announce(*news())
            fixed = bound()
            view, move = (self._view(), None) if fixed else await self._reconsider()
            if move is None:
                self._wish = None
                # Record the decision to keep the present layers, with its reason, for `swarmnode why`
                own, hysteresis = self._host.directory.own, self._move_policy().hysteresis
                assert own is not None
                reason = f"every layer is on a machine; it moves if one is not, or if the swarm gains {hysteresis:.0%}"
                if not own.span[1]:
                    reason = "every layer is on two machines, and a step would not be shorter with this node"
                if fixed:
                    reason = (
                        "these layers are fixed with --span or --plan, no other machine trains them, or texts end first"
                    )
                self._record(view, f"keeps {layers(*own.span)}" if own.span[1] else STANDS_BY, Span(*own.span), reason)
            elif self._is_due(move):
                if not move.fills:
                    await settled()
                    if bound():
                        continue
                self._leaving_s = self._clock()
                if move.disturbs:
                    self._pauses.failed(self._host.peer_id)
                self._record(view, f"moves to {layers(*move.span)}", move.span, *_reasons(move))
                return move
            else:
                self._record(view, f"will move to {layers(*move.span)} when it is its turn", move.span, *_reasons(move))
            # Wait for the next look: a moment while a wish waits for its turn, else until the directory differs from
            # `revision`
            await asyncio.sleep(self.config.move_interval_s)
            if self.awaits_others():
                self._host.directory.hurry()
            if self._wish is None:
                with contextlib.suppress(asyncio.TimeoutError):
                    calm_s = self.config.calm_interval_s - self.config.move_interval_s
                    await asyncio.wait_for(self._host.directory.changed(revision), calm_s)

    async def _reconsider(self) -> tuple[View, Move | None]:
        """Return the view of the directory and the move that pays; None if none does.

        The directory of a large swarm is a sample: the table is searched for holders of layers before they count as missing.
        """
        directory, view = self._host.directory, self._view()
        move = await self._wish_in(view)
        if move is None or not move.fills or directory.crowd <= len(directory.peers()):
            return view, move
        for unit in gaps(view.units, view.peers)[:SEARCHED_GAPS]:
            await directory.read_holders(unit)
        view = self._view()
        return view, await self._wish_in(view)

    async def _wish_in(self, view: View) -> Move | None:
        return await asyncio.to_thread(self._rule.reconsider, view, self._joiner(), self._move_policy())

    def awaits_others(self) -> bool:
        """Return whether new work had better wait: at the last look other peers were still moving to their places."""
        return self._rule.awaits_others()

    def arrived(self) -> None:
        """Note that the node serves again after a move; the measured duration is the estimate for the next move."""
        if self._leaving_s is not None:
            self._move_s, self._leaving_s = self._clock() - self._leaving_s, None

    def _is_due(self, move: Move) -> bool:
        """Return whether the wish has stood long enough, and the last move that disturbed others is long enough ago."""
        if self._wish is not None and move.is_same_wish(self._wish.move):
            self._wish = replace(self._wish, move=move)
        else:
            self._wish = _Wish(move, self._clock())
        rests = move.disturbs and not move.fills and self._pauses.pause_s(self._host.peer_id) > 0
        return not rests and self._clock() - self._wish.since_s >= move.delay_s

    def _record(self, view: View, what: str, span: Span, *reasons: str) -> None:
        facts = (*reasons, *grounds(view, self._joiner(), span))
        self._host.decisions.record(Topic.PLACEMENT, what, facts, units=span)

    def _view(self) -> View:
        manifest = self._host.swarm.manifest
        assert manifest is not None
        model, shunned = manifest.model, self._host.standing.shunned
        announced = [peer for peer in self._host.directory.peers().values() if peer.peer not in shunned]
        position_bytes, trains = manifest.width * BYTES_PER_HIDDEN, manifest.mode == TRAIN
        view = view_of(model.units, announced, position_bytes=position_bytes, trains=trains)
        return self._hysteresis.view(view.with_many_sessions)

    def _joiner(self) -> Joiner:
        own = self._host.directory.own
        assert own is not None  # a claim or a span is announced before the first decision
        manifest = self._host.swarm.manifest
        trains = manifest is not None and manifest.mode == TRAIN
        units_per_s = own.training_units_per_s if trains else own.decode_units_per_s * own.parallel_speedup
        return Joiner(self._host.peer_id, self._capacity_units, units_per_s, own.started_at)

    def _move_policy(self) -> MovePolicy:
        """Return the policy with the measured time of a move. In a sample one peer's share looks larger than it is, so the
        hysteresis grows in proportion."""
        directory = self._host.directory
        share = min(1.0, len(directory.peers()) / max(1.0, directory.crowd))
        move_policy = self.config.move_policy
        stay_s = min(move_policy.stay_s, self._rest_s())
        hysteresis = move_policy.hysteresis / max(share, 1e-6)
        return replace(move_policy, move_s=self._move_s, stay_s=stay_s, hysteresis=hysteresis)


def _reasons(move: Move) -> tuple[str, str]:
    gain = (
        "layers there are on no machine" if move.fills else f"with this node there the swarm is {move.gain:.0%} faster"
    )
    return gain, f"it moves if that is still so after {move.delay_s:.1f} s"
