"""Coordinator election: it sees to it that one node leads the training, namely the eldest ready node that may lead."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Error
from swarmnode.codec.training_messages import Failed, Work
from swarmnode.decisions import DecisionLog, Topic
from swarmnode.errors import ErrorCode, PeerError, PeerLost
from swarmnode.links.switchboard import Channel
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import OnCrash, Tasks
from swarmnode.plan.training.coordination import SETTLE_S, Action, Coordination, Event, Phase
from swarmnode.swarm.peers.directory import Directory
from swarmnode.swarm.records.announcement import State, peer_digest
from swarmnode.training.coordinator.coordinator import TERM_BITS, Coordinator
from swarmnode.training.coordinator.link_times import STALLED_S, Failures, LinkTimes
from swarmnode.training.coordinator.step_loop import CoordinatorResources
from swarmnode.training.coordinator.worker_group import Line, Loopback
from swarmnode.training.worker.stage_state import check_positions
from swarmnode.training.worker.training_stage import TrainingStage

log = logging.getLogger(__name__)

LOOK_S = 1.0
PASS_OVER_S = 10.0  # for the node whose turn it is; after that the next one may take over
LET_GO_S = 60.0  # the same after a coordinator dismissed this stage: it leads the others, and calls this one again after a pause


@dataclass(eq=False)
class CoordinatorElection:
    """The election as one node takes part in it: its state machine (`plan/training/coordination.py`), and its coordinator
    while it leads."""

    directory: Directory
    stage: TrainingStage
    units: int
    link_times: LinkTimes
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    on_crash: OnCrash | None = None
    decisions: DecisionLog = field(default_factory=DecisionLog)
    awaits_others: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._resources = CoordinatorResources(
            self.units,
            self._dial,
            Failures(self.clock, self.stage.spot_checks.standing),
            self.link_times,
            check_run=partial(check_positions, self.stage.segment),
            standing=self.stage.spot_checks.standing,
            codecs=self.stage.compressor.allowed,
            clock=self.clock,
            decisions=self.decisions,
            awaits_others=self.awaits_others,
        )
        self._machine = Coordination()
        self._vacant_since_s = self.clock()
        self._pass_over_s = PASS_OVER_S
        self._coordinator: Coordinator | None = None
        self._where: tuple[int, dict[int, int]] | None = None  # the step of our stage, and its counts
        self._still_since_s = self.clock()  # since when these have not changed
        self._tasks = Tasks("election", on_crash=self.on_crash)
        self._changed = asyncio.Event()
        self.stage.may_lead = self._may_lead
        self.stage.on_work = self._work
        self.stage.following.on_followed = self._followed
        self.stage.following.on_lost = self._lost

    def __repr__(self) -> str:
        return f"<CoordinatorElection of {self.stage!r}, {self._coordinator or self._machine}>"

    @property
    def phase(self) -> Phase:
        """Phase of this stage in the training, as `plan/training/coordination.py` lists them."""
        return self._machine.phase

    def start(self) -> None:
        """Start to look for a coordinator, and to take over if it is this node's turn."""
        self._tasks.spawn(self._watch(), "watch")
        self._tasks.spawn(self._follow_directory(), "directory")

    async def close(self) -> None:
        """Stop looking for a coordinator, and stop coordinating."""
        await self._tasks.close()
        if self._coordinator is not None:
            await self._coordinator.close()

    async def _follow_directory(self) -> None:
        revision = -1
        while True:
            revision = await self.directory.changed(revision)
            self._changed.set()

    async def _watch(self) -> None:
        """On each change, and every LOOK_S: check for a coordinator, take over if it is this node's turn, and connect new
        stages to our coordinator."""
        while True:
            try:
                await asyncio.wait_for(self._changed.wait(), LOOK_S)
            except asyncio.TimeoutError:
                if self._coordinator is not None:
                    await self.directory.refresh()  # it slows down in calm times; newcomers are to be useful soon
            self._changed.clear()
            where = self.stage.state.step, self.stage.state.masks
            if where != self._where:
                self._where, self._still_since_s = where, self.clock()
            if self._has_leader():
                self._vacant_since_s = self.clock()
            else:
                await self._happen(Event.DESERTED)
            if not self._has_leader() and self._is_our_turn():
                await self._happen(Event.OUR_TURN)
            if self._coordinator is not None:
                self._coordinator.enlist(ready_peers(self.directory))

    def _has_leader(self) -> bool:
        """Return whether this node coordinates the training, or follows a peer that may coordinate."""
        coordinator = self.stage.following.coordinator
        return self._coordinator is not None or (coordinator is not None and self._may_lead(coordinator))

    def _is_our_turn(self) -> bool:
        """Return whether this node is the eldest that may lead. After each PASS_OVER_S (LET_GO_S after a dismissal) without
        a coordinator the next eldest may take over, too."""
        able = list(filter(self._may_lead, ready_peers(self.directory)))
        passed_over = int((self.clock() - self._vacant_since_s) // self._pass_over_s)
        return self.directory.network.peer_id in able[: passed_over + 1]

    def _may_lead(self, peer: PeerId) -> bool:
        return self.stage.gate.may_lead(peer, ready_peers(self.directory))

    def _is_stalled(self) -> bool:
        """Return whether the coordinator gives out no work, although every layer has a ready holder: no progress for STALLED_S."""
        held = {
            unit for peer in self.directory.peers().values() if peer.life is State.READY for unit in range(*peer.span)
        }
        return self.clock() - self._still_since_s >= STALLED_S and len(held) >= self._resources.units

    async def _happen(self, event: Event) -> None:
        for action in self._machine.on(event):
            if action is Action.SETTLE:
                # Wait a moment before taking over: an elder peer, or the word of another coordinator, may be on its way.
                await asyncio.sleep(SETTLE_S)
                await self.directory.refresh()
                if self._machine.phase is Phase.CANDIDATE:
                    await self._happen(Event.SETTLED if self._is_our_turn() else Event.NOT_OUR_TURN)
            elif action is Action.CALL_ROLL:
                term = term_after(self.stage.following.term, self.directory.network.peer_id)
                self._coordinator = Coordinator(term, self._resources, self._machine, self._resign_at)
                log.info("your node leads the training from now on")
                able = len(list(filter(self._may_lead, ready_peers(self.directory))))
                vacant_s = self.clock() - self._vacant_since_s
                facts = (
                    f"no machine has led for {vacant_s:.0f} s",
                    f"it is this node's turn among {able} machines that may lead",
                )
                self._resources.decisions.record(Topic.TRAINING, "leads the training", facts)
                self._coordinator.start()
            elif action is Action.RESIGN:
                self._resign()

    def _followed(self, peer: PeerId) -> None:
        """Handle that our stage follows a coordinator; if it is another peer's, ours resigns."""
        facts = (f"it took over last (term {self.stage.following.term})",)
        self._resources.decisions.record(Topic.TRAINING, f"follows {peer[-8:]}, who leads", facts, about=(peer,))
        if peer != self.directory.network.peer_id:
            self._let_go()

    def _resign_at(self, term: int) -> None:
        """Resign because our coordinator heard of `term`, or failed; the next coordinator takes a still higher term."""
        following = self.stage.following
        following.term = max(following.term, term)
        self._let_go()

    def _let_go(self) -> None:
        if Action.RESIGN in self._machine.on(Event.FOLLOWED):
            self._resign()
        self._changed.set()

    def _resign(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            log.info("your node no longer leads the training")
            self._tasks.spawn(coordinator.close(), "resign")

    def _lost(self, peer: PeerId, error: PeerError | None) -> None:
        self._pass_over_s = LET_GO_S if error is None else PASS_OVER_S
        facts = (
            f"it dismissed this node; another machine's turn comes in {LET_GO_S:.0f} s"
            if error is None
            else str(error),
        )
        self._resources.decisions.record(Topic.TRAINING, f"does not follow {peer[-8:]} any more", facts, about=(peer,))
        if error is not None:
            self.directory.suspect(peer, str(error))
        self._changed.set()

    async def _dial(
        self, peer: PeerId, on_frame: Callable[[Frame, Body], None], on_lost: Callable[[PeerError], None]
    ) -> Line:
        if peer != self.directory.network.peer_id:
            try:
                return await self.stage.switchboard.call(peer, on_frame, on_lost)
            except PeerLost as error:
                self.directory.suspect(peer, str(error))
                raise
        here, there = Loopback.pair(peer)
        here.on_frame, here.on_lost = on_frame, on_lost
        self.stage.follow(there)
        return here

    def _work(self, channel: Channel, body: Work) -> None:
        """Handle a trainer's offer: pass it to our coordinator, or refuse it and name the coordinator that we follow. If there is
        none, the trainer is refused without a name. A stalled coordinator is deserted, and not named either."""
        if self._coordinator is not None:
            self._coordinator.work(channel, body)
        elif self.stage.following.coordinator is not None and not self._is_stalled():
            channel.close(Failed(0, self.stage.following.coordinator, ErrorCode.ELSEWHERE))
        else:
            self.stage.following.desert()
            channel.close(Error(ErrorCode.ELSEWHERE))


def term_after(term: int, peer: PeerId) -> int:
    """Return a higher term than `term`. Two peers that take over at once get different terms, so that one of them resigns."""
    return ((term >> TERM_BITS) + 1 << TERM_BITS) + int.from_bytes(peer_digest(peer)[: TERM_BITS // 8], "big")


def ready_peers(directory: Directory) -> list[PeerId]:
    """Return the ready peers that hold layers, the eldest first; bootstrap peers hold none."""
    ready = [peer for peer in directory.peers().values() if peer.life is State.READY and peer.span[0] < peer.span[1]]
    return [peer.peer for peer in sorted(ready, key=lambda peer: (peer.started_at, peer.peer))]
