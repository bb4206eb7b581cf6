"""Spot checks: a stage recomputes microbatches of its replicas, and handles accusations.

When a step's gradients are about to be summed, all microbatches are counted, and all stages still have the step's
parameters. At this moment a stage may draw one of its replicas and a microbatch that it has committed to. A stage found
false is named in every later summation with it (`coordinator/averaging_groups.py` follows the majority of the others).
The other stages hear an accusation and check for themselves: none trusts another's word.

A stage also looks at one hop beside it: whether what that hop committed to having sent or returned is what arrived here. It knows
this for itself alone, so the coordinator lets the two not exchange microbatches any more (`Transfers.separate`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, field

from swarmnode.codec.audit_messages import SPOT_CHECK_PROTOCOL, Accusation
from swarmnode.codec.body import SHARED
from swarmnode.codec.tensors import Codec
from swarmnode.codec.training_messages import Forward, How, Reduce
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.recomputation import ContributionSketch, step_seed
from swarmnode.errors import NotFinite, ProtocolError, SwarmnodeError
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.findings_record import Findings
from swarmnode.peer.questions import LocalPeer, ask, board_of
from swarmnode.plan.audits import AuditBudget, Calibration, Judgement, SessionCost
from swarmnode.plan.findings import Kind
from swarmnode.swarm.records.statement import open_commitment
from swarmnode.tolerances import CONTRIBUTED
from swarmnode.training.spot_checks.check_examination import (
    Examination,
    FalseWork,
    differ,
    judge_contribution,
    shapes_of,
)
from swarmnode.training.spot_checks.step_records import Committer, StepRecords, StoredMicrobatch, check_server
from swarmnode.training.worker.admission import ReceivedLabels

log = logging.getLogger(__name__)

RECOMPUTED = 4 / 3  # passes: forward twice, backward once
HASHED = 0.01  # of a pass: the payloads of a microbatch, for a commitment
CHECK_S = 20.0
WITHIN = 0.5  # largest share of the time for an all-reduce: slower peers are not waited for
TELL_S = 5.0
RESULTS = ("passed", "false", "void")
WITHOUT_RESULT = (  # data of a peer may be unlike anything that torch expects
    *(SwarmnodeError, asyncio.TimeoutError),
    *(ValueError, RuntimeError, LookupError, TypeError, ArithmeticError),
)
MAX_SUSPICIONS = 64


class Suspicions:
    """Pending accusations, one per author, so that no author diverts all checks from another peer."""

    def __init__(self, standing: Findings) -> None:
        self._standing = standing
        self._by_author: dict[PeerId, tuple[PeerId, list[str]]] = {}  # accused peer, and the results of checks of it

    def __len__(self) -> int:
        return len(self._by_author)

    def record(self, author: PeerId, accused: PeerId) -> None:
        """Record an accusation. Ignores it if its author has accused in vain before, is shunned, accuses itself or has one pending,
        or if there are MAX_SUSPICIONS already."""
        doubtful = author == accused or author in self._standing.shunned | self._standing.doubted
        if not doubtful and author not in self._by_author and len(self._by_author) < MAX_SUSPICIONS:
            self._by_author[author] = (accused, [])

    def next(self, peers: Collection[PeerId]) -> PeerId | None:
        """Return the peer to check: one of `peers` that another one of them accuses; None if there is none."""
        told = ((author, accused) for author, (accused, _) in self._by_author.items())
        return next((accused for author, accused in told if author in peers and accused in peers), None)

    def record_check(self, accused: PeerId, result: str) -> None:
        """Record the result of a check of a peer, whatever the reason for the check. Ends accusations that are settled."""
        for author, (told, results) in list(self._by_author.items()):
            if told != accused:
                continue
            results.append(result)
            if self._standing.has_settled(author, accused, results):
                del self._by_author[author]


@dataclass(eq=False)
class SpotChecks:
    """Spot checks of one stage. A recomputation takes its memory from `ledger`; `standing` keeps the results over restarts."""

    peer: LocalPeer
    committer: Committer
    executor: Executor
    standing: Findings
    ledger: MemoryLedger
    _: KW_ONLY
    budget: AuditBudget = field(default_factory=AuditBudget)
    dice: random.Random = field(default_factory=random.SystemRandom)

    def __post_init__(self) -> None:
        self.records = StepRecords(self.peer.link_config.ledger)
        self.counts: Counter[str] = Counter()
        self._calibration = Calibration()
        self._suspicions = Suspicions(self.standing)
        self._checked = (b"", -1)  # the run and step of the last draw
        self._drawn: PeerId | None = None  # in that step, and not checked yet
        self._exchange: tuple[StoredMicrobatch, PeerId] | None = None  # with a hop beside this one, likewise
        self._watched: ContributionSketch | None = None
        self._board = board_of(self.peer, SPOT_CHECK_PROTOCOL)
        self._members: frozenset[PeerId] = frozenset()  # of the last REDUCE
        self._server = check_server(
            self.peer, self.committer, self.records, lambda asker: asker in self._members, self._receive
        )
        self._telling = Tasks("accusations", on_crash=self.peer.link_config.supervisor.ends_conversation)

    def __repr__(self) -> str:
        return f"<SpotChecks {self.budget!r}, {dict(self.counts)}, {self.records!r}>"

    def readings(self) -> Readings:
        """Yield the counts of the checks by result."""
        for result in RESULTS:
            yield Reading(table.SPOT_CHECKS, self.counts[result], (result,))

    async def start(self) -> None:
        """Start answering replicas."""
        await self._server.start()

    async def close(self) -> None:
        """Stop, and forget the kept microbatches."""
        await self._telling.close()
        await self._server.close()
        await self._board.close()
        self.records.clear()

    def remember(
        self, learner: DeviceLearners, body: Forward, payload: Buffer, labels: ReceivedLabels | None
    ) -> StoredMicrobatch | None:
        """Return a record of a microbatch that is about to be computed; None if it was counted before, if it is held-out data,
        which give no gradients, or if there is no room."""
        hop = body.route[body.hop]
        again = learner.has_counted(body.number, hop.start, hop.end) or body.number >= learner.run.microbatches
        return None if again else self.records.open(body, payload, labels)

    # -- checking

    def watch(self, reduce: Reduce, learner: DeviceLearners) -> ContributionSketch | None:
        """Perhaps draw a replica to check, once in a step, before gradients are summed.

        Returns the sketch that takes in the replica's contributions; None if no replica is drawn or its contributions
        cannot be compared: they contain residuals of other steps, or blocks that are not here.
        """
        self._members = frozenset(member.peer for group in reduce.groups for member in group.members)
        if (learner.run.id, learner.step) != self._checked:
            self._drawn = self._draw(reduce, learner)
            self._exchange = self._draw_exchange(learner)
        due = contributed_by(self._drawn, reduce)
        averaging = learner.run.averaging
        whole = averaging.codec in CONTRIBUTED and not averaging.rank and not averaging.by_line
        self._watched = None
        if self._drawn is not None and due and whole and all(block in learner.blocks for block in due):
            seed = step_seed(learner.run.id, learner.step)
            self._watched = ContributionSketch(self._drawn, learner.lengths(list(due)), seed)
        return self._watched

    async def check(self, reduce: Reduce, learner: DeviceLearners) -> PeerId:
        """Check the drawn replica and neighbour after the gradients are summed. Returns a contributor, else a neighbour of this
        step, that was found false here, now or before; empty if there is none. Raises nothing that a peer can cause."""
        await self._check_drawn(reduce, learner)
        await self._check_exchange(reduce, learner)
        beside = {peer for _, peer in self._exchanges(learner)}
        proved = self.standing.proved
        return min(proved & contributors(reduce), default="") or min(proved & beside, default="")

    async def _check_drawn(self, reduce: Reduce, learner: DeviceLearners) -> None:
        drawn, self._drawn = self._drawn, None
        if drawn is None or drawn not in contributors(reduce):
            return
        kept = self.records.of(learner.run.id, learner.step).values()
        usual = {one.place[1]: shapes_of(one.body.values + one.labels_values) for one in kept}
        examination = Examination(self._board, drawn, self.committer, learner, usual, self.dice)
        try:
            judgement = await asyncio.wait_for(self._examine(examination, reduce, learner), _within_s(reduce))
        except (FalseWork, NotFinite) as error:
            self._find(examination, str(error), contributors(reduce))
        except WITHOUT_RESULT as error:
            log.info("a spot check of peer %s had no result: %s", drawn, error or "no answer in time")
            self.standing.add(drawn, Kind.SILENT, f"it did not show its work of step {learner.step}")
            self._record(drawn, "void")
        else:
            self._settle(examination, reduce, judgement)
        await asyncio.to_thread(self.standing.save)

    async def _check_exchange(self, reduce: Reduce, learner: DeviceLearners) -> None:
        """Compare the drawn microbatch with the record of the hop that it was exchanged with. A hop without a record of the same
        attempt, or of an older version, is not found false."""
        drawn, self._exchange = self._exchange, None
        if drawn is None:
            return
        own, peer = drawn
        examination = Examination(self._board, peer, self.committer, learner, {}, self.dice)
        asking = examination.fetch_exchanged(own.neighbours[peer], own.body.lease)
        try:
            record = await asyncio.wait_for(asking, _within_s(reduce) / 2)
            if record is None or not await asyncio.to_thread(differ, own, record):
                return
            why = f"microbatch {own.body.number} left it otherwise than it signed"
        except FalseWork as error:
            why = str(error)
        except WITHOUT_RESULT as error:
            log.info("peer %s did not show an exchanged microbatch: %s", peer, error or "no answer in time")
            return
        self._find(examination, why)
        await asyncio.to_thread(self.standing.save)

    def _exchanges(self, learner: DeviceLearners) -> list[tuple[StoredMicrobatch, PeerId]]:
        """Return the microbatches of the step that this stage exchanged with other stages, with each of these."""
        kept = self.records.of(learner.run.id, learner.step).values()
        return [(one, peer) for one in kept for peer in one.neighbours]

    def _draw_exchange(self, learner: DeviceLearners) -> tuple[StoredMicrobatch, PeerId] | None:
        """Return a microbatch to compare with a hop beside this one; None if there is none, or this stage checks nothing. It is
        charged to the budget and does not wait for it: it costs a fraction of what a step earns."""
        able = [(one, peer) for one, peer in self._exchanges(learner) if peer not in self.standing.proved]
        if not able or not self.budget.share:
            return None
        counted = len(self.records.of(learner.run.id, learner.step))
        self.budget.spend(SessionCost(counted, HASHED * counted))
        return self.dice.choice(able)

    def _draw(self, reduce: Reduce, learner: DeviceLearners) -> PeerId | None:
        """Return the peer to check in this step: a suspect, or at random any contributor; None for most steps."""
        step = learner.run.id, learner.step
        averages = learner.run.averaging.every > 1  # parameters differ then
        others = contributors(reduce) - self.standing.proved - {self.committer.peer}
        self._checked = step
        if averages or not others or not learner.segment.is_portable:
            return None
        counted = max(map(int.bit_count, learner.counted.values()), default=0)
        cost = SessionCost(served_s=counted, audit_s=RECOMPUTED)  # in passes
        peer = self.dice.choice(sorted(others))
        chance = self.budget.chance(cost, self.standing.trust(peer))
        suspected = self._suspicions.next(others)
        if suspected is not None and self.budget.afford(cost):
            return suspected
        if self.dice.random() >= chance:
            return None
        self.budget.spend(cost)
        return peer

    async def _examine(self, examination: Examination, reduce: Reduce, learner: DeviceLearners) -> Judgement | None:
        shown = await examination.fetch()
        sums = await examination.fetch_sums(contributed_by(examination.peer, reduce))
        contributed = None
        if self._watched is not None and self._watched.blocks:
            contributed = judge_contribution(self._watched, sums, Codec(learner.run.averaging.codec))
        if shown is None or (contributed is not None and contributed.false):
            return contributed
        with self.ledger.reserve(Account.GRADIENTS, learner.gradient_bytes):
            return await self.executor.call(
                Urgency.CONTROL,
                lambda: examination.compare(shown, self._calibration),
                kind="spot check",
                owner=examination.peer,
            )

    def _settle(self, examination: Examination, reduce: Reduce, judgement: Judgement | None) -> None:
        if judgement is None:
            self._record(examination.peer, "void")
        elif judgement.false:
            beyond = f"{judgement.beyond} of {judgement.compared} rows exceed the tolerance"
            self._find(examination, f"{beyond}, by up to {judgement.worst:.3g} times", contributors(reduce))
        else:
            self._record(examination.peer, "passed")
            right = f"{judgement.compared} rows of a microbatch are as they were computed again here"
            self.standing.add(examination.peer, Kind.RIGHT, right, weight=judgement.compared)

    def _find(self, examination: Examination, why: str, contributors: Collection[PeerId] = ()) -> None:
        """Record that the examined peer is false, and tell the other contributors to look at it, too."""
        peer = examination.peer
        self._record(peer, "false")
        self.standing.add(peer, Kind.FALSE, f"in the training: {why}")
        accusation = Accusation(examination.learner.run.id, peer, examination.commitment)
        for other in sorted(set(contributors) - {self.committer.peer, peer}):
            self._telling.spawn(self._tell(other, accusation), f"tell {other}")

    def _record(self, peer: PeerId, result: str) -> None:
        self.counts[result] += 1
        self._suspicions.record_check(peer, result)

    # -- telling

    async def _tell(self, other: PeerId, accusation: Accusation) -> None:
        async def send() -> None:
            async for _ in ask(self._board, other, accusation):
                pass

        try:
            await asyncio.wait_for(send(), TELL_S)
        except (SwarmnodeError, asyncio.TimeoutError) as error:
            log.info("peer %s did not receive your accusation: %s", other, error or "no answer in time")

    def _receive(self, author: PeerId, accusation: Accusation) -> None:
        """Record an accusation if it shows a commitment that the accused signed in the same run, unless `Suspicions.record`
        ignores it. The accused is checked before others when the budget affords it."""
        try:
            commitment = open_commitment(accusation.commitment, self.committer.swarm, self.committer.verify)
        except ProtocolError as error:
            log.info("an accusation without a valid commitment: %s", error)
            return
        if (commitment.peer, commitment.run) == (accusation.peer, accusation.run):
            self._suspicions.record(author, accusation.peer)


def _within_s(reduce: Reduce) -> float:
    """Return the longest time of a check in seconds."""
    return min(CHECK_S, WITHIN * reduce.within_s or CHECK_S)


def contributors(reduce: Reduce) -> set[PeerId]:
    """Return the peers whose gradients of the receiver's units are summed. The shared block does not count: its ends
    contribute different gradients."""
    groups = (group for group in reduce.groups if group.how == How.SUM and group.blocks != (SHARED,))
    return {member.peer for group in groups for member in group.members if member.count}


def contributed_by(peer: PeerId | None, reduce: Reduce) -> dict[int, int]:
    """Return the number of microbatches in a peer's gradients, by block of the receiver's sums, without groups with the
    shared block."""
    groups = (group for group in reduce.groups if group.how == How.SUM and SHARED not in group.blocks)
    return {
        block: member.count
        for group in groups
        for member in group.members
        if member.peer == peer and member.count
        for block in group.blocks
    }
