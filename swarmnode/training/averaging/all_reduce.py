"""All-reducer: replicas of the same blocks agree on one gradient, or on one set of parameters.

The arithmetic is that of `compute/training/averaging/gradient_compressor.py`: in each round the contributors' vectors are
summed in parts (`attempt.py`), so that all members end with identical numbers. No lasting state changes before the commit:
a failed attempt is repeated with other members.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from swarmnode.codec.audit_messages import SEED_BYTES
from swarmnode.codec.body import SHARED
from swarmnode.codec.messages import Error
from swarmnode.codec.tensors import Codec
from swarmnode.codec.training_messages import Form, Group, How, Pull, Reduce
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.training.averaging.gradient_compressor import (
    Exchange,
    GradientCompressor,
    make_gradient_compressor,
)
from swarmnode.compute.training.averaging.parts import FlatVector, Forms
from swarmnode.compute.training.averaging.robust_aggregation import LEAST_MEMBERS, History, OutlierDetector
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.recomputation import ContributionSketch
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.findings import Signs, outlier
from swarmnode.plan.training.averaging import codecs_by_line, is_bearable, may_cluster
from swarmnode.swarm.records.run import Averaging, Run
from swarmnode.training.averaging.attempt import Attempt, Circle
from swarmnode.training.averaging.partner import AttemptId, EarlyPulls, attempt_of

Blocks = tuple[int, ...]
T = TypeVar("T")


@dataclass
class Agreed:
    """The result of an all-reduce, by blocks. Blocks without a vector keep their own accumulators."""

    sums: dict[Blocks, Tensor] = field(default_factory=dict)
    pseudo_gradients: dict[Blocks, Tensor] = field(default_factory=dict)
    summed: set[int] = field(default_factory=set)
    apart: set[int] = field(default_factory=set)
    squares: list[float] = field(default_factory=list)
    gradient_compressors: list[GradientCompressor] = field(default_factory=list)
    detector: OutlierDetector | None = None
    histories: dict[PeerId, History] = field(default_factory=dict)  # of the contributors, this all-reduce included
    rates_bps: dict[PeerId, float] = field(default_factory=dict)  # at which parts came from the others, if known

    @property
    def size_bytes(self) -> int:
        """Bytes of the vectors."""
        return sum(vector_N.nbytes for vector_N in (*self.sums.values(), *self.pseudo_gradients.values()))

    @property
    def suspect(self) -> PeerId:
        """The peer whose contribution seems not to be its gradient; empty if there is none."""
        seen = self.histories.items()
        return outlier({peer: Signs(one.distance, one.against, one.constancy, one.steps) for peer, one in seen}) or ""

    def commit(self, learner: DeviceLearners, norm: float) -> None:
        """Update the learner with the result. Must run on the executor."""
        learner.commit(self.sums, norm, summed=self.summed, apart=self.apart, pseudo_gradients=self.pseudo_gradients)
        for gradient_compressor in self.gradient_compressors:
            gradient_compressor.accept()
        if self.detector is not None:
            self.detector.accept(self.histories)


@dataclass(eq=False)
class AllReducer:
    """Maker of a stage's all-reduces with the replicas of its layers, one attempt at a time. `codecs`: those that the swarm
    allows."""

    peer: PeerId
    switchboard: Switchboard
    executor: Executor
    codecs: Collection[int] = tuple(Codec)

    def __post_init__(self) -> None:
        self._early = EarlyPulls()
        self._attempt: Attempt | None = None
        self._newest = AttemptId(-1, -1, -1, b"")
        self._learner: DeviceLearners | None = None
        self._gradient_compressors: dict[tuple[Blocks, int], GradientCompressor] = {}
        self._detector = _new_detector()

    def __repr__(self) -> str:
        return f"<AllReducer with {self._attempt!r}, {self._early!r}, {len(self._gradient_compressors)} exchanges>"

    def receive(self, channel: Channel, body: Pull) -> None:
        """Take a replica's PULL. One of a later attempt is kept until our own REDUCE has arrived; one of an earlier attempt
        is refused."""
        attempt = attempt_of(body)
        if attempt.order > self._newest.order:
            self._early.store_pull(channel, body)
        elif self._attempt is None or attempt != self._attempt.attempt:
            channel.close(Error(ErrorCode.STALE))
        elif channel.peer in self._attempt.partners:
            self._attempt.partners[channel.peer].pulled(channel, body)
        else:
            channel.close(Error(ErrorCode.REFUSED))

    async def reduce(
        self,
        term: int,
        body: Reduce,
        learner: DeviceLearners,
        *,
        listening: bool,
        watched: ContributionSketch | None = None,
    ) -> Agreed:
        """Agree with the members of each group that this stage is in.

        Args:
            term: the coordinator's term.
            body: the groups and the attempt.
            learner: the learner of the step.
            listening: this stage takes part without a gradient while it fetches its state.
            watched: records the contributions of one member; None for no record.

        Returns:
            The result, which `Agreed.commit` applies.

        Raises:
            PeerLost: with the peer that stands still or is lost.
            ProtocolError: with the peer that broke the rules.
            NotFinite: if this stage's gradient is NaN or infinite.
        """
        if learner is not self._learner:  # another run or state: earlier residuals do not belong to it
            self._learner = learner
            self._gradient_compressors.clear()
            self._detector = _new_detector()
        if learner.run.averaging.every == 1 and any(group.how != How.SUM for group in body.groups):
            raise ProtocolError("the REDUCE lets replicas update apart, which this run does not allow")
        if not all(is_bearable(group, self.peer, self._received_bps(group)) for group in body.groups):
            raise ProtocolError("the REDUCE uses clusters over paths that are far too slow, as measured here")
        circles = {
            group.number: self._circle(group, learner, watched) for group in body.groups if len(group.members) > 1
        }
        attempt = self._begin(AttemptId(term, body.step, body.attempt, body.run), list(circles.values()))
        agreed = Agreed(detector=self._detector)
        self._detector.begin()
        try:
            async with attempt:
                for group in body.groups:
                    await self._agree_on(group, attempt, circles.get(group.number), agreed, listening=listening)
        finally:
            if self._attempt is attempt:
                self._attempt = None
        agreed.histories = self._detector.histories()
        for group in body.groups:
            agreed.rates_bps |= self._received_bps(group)
        return agreed

    def _received_bps(self, group: Group) -> dict[PeerId, float]:
        """Return the measured rates of the other members' parts; members without a measurement are left out."""
        received = ((member.peer, self.switchboard.received_bps(member.peer)) for member in group.members)
        return {peer: bps for peer, bps in received if bps}

    def _begin(self, number: AttemptId, circles: list[Circle]) -> Attempt:
        attempt = Attempt(self.peer, number, self.switchboard, self._call, circles, self._early)
        self._attempt = attempt
        self._newest = max(self._newest, number, key=lambda one: one.order)
        self._early.drop_until(self._newest)
        return attempt

    async def _agree_on(
        self, group: Group, attempt: Attempt, circle: Circle | None, agreed: Agreed, *, listening: bool
    ) -> None:
        learner = self._learner
        assert learner is not None
        blocks = tuple(block for block in group.blocks if block in learner.blocks)
        if not blocks:
            agreed.squares.append(0.0)
        elif group.how == How.SUM:
            total_N = None
            if circle is not None:
                local = await self._call(lambda: _sound_gradient(learner, blocks))
                total_N = agreed.sums[blocks] = torch.empty(len(local), device=local.device)
                await self._sum(local, FlatVector([total_N]), blocks, group.how, attempt, circle, agreed)
            agreed.summed.update(blocks)
            agreed.squares.append(await self._call(lambda: learner.squared_norm(blocks, total_N)))
        else:
            if group.how == How.AVERAGE:
                # Average the members' pseudo-gradients (changes of parameters since the last averaging) into `agreed`.
                # Without a circle, this node's own one is taken.
                pseudo_gradient_N = await self._call(lambda: learner.pseudo_gradients(blocks))
                if circle is not None:
                    await self._call(lambda: pseudo_gradient_N.mul_(circle.weights.get(self.peer, 0.0)))
                    pseudo_gradients = FlatVector([pseudo_gradient_N])
                    await self._sum(pseudo_gradients, pseudo_gradients, blocks, How.AVERAGE, attempt, circle, agreed)
                agreed.pseudo_gradients[blocks] = pseudo_gradient_N
            agreed.apart.update(blocks)
            agreed.squares.append(0.0 if listening else await self._call(lambda: learner.apart_squared_norm(blocks)))

    async def _sum(
        self,
        local: FlatVector,
        total: FlatVector,
        blocks: Blocks,
        how: int,
        attempt: Attempt,
        circle: Circle,
        agreed: Agreed,
    ) -> None:
        """Average one group of blocks: run the compressor's rounds, and sum the values of each round with the members in
        `circle`."""
        assert self._learner is not None
        # Its compressor keeps the values that it left out in earlier steps.
        if (blocks, how) not in self._gradient_compressors:
            averaging = self._learner.run.averaging
            # The gradients of the ends are added in the shared block, and neither estimates the other.
            if SHARED in blocks and how == How.SUM:
                codec = Codec.FP16 if averaging.codec == Codec.TOPK else averaging.codec
                averaging = msgspec.structs.replace(averaging, codec=codec, rank=0, by_line=False, alternating=False)
            self._gradient_compressors[blocks, how] = make_gradient_compressor(averaging, self._learner.shapes(blocks))
        gradient_compressor = self._gradient_compressors[blocks, how]
        clipping = None
        if circle.robust:
            clipping = self._detector.clipping(circle.group, tuple(circle.weights), circle.members)
        weight = circle.weights.get(self.peer, 0.0)
        forms = circle.forms if gradient_compressor.averaging.by_line else None
        rounds = gradient_compressor.run(Exchange(local, total, weight, clipping, forms, circle.warm_start))
        number = 0
        while (round_ := await self._call(lambda: next(rounds, None))) is not None:
            await attempt.sum(circle, number, round_)
            number += 1
        agreed.gradient_compressors.append(gradient_compressor)

    def _circle(self, group: Group, learner: DeviceLearners, watched: ContributionSketch | None) -> Circle:
        """Return the circle of a group. Contributors weigh as much as their share of the microbatches. Raises ProtocolError if the
        group has clusters or codecs that the run does not allow."""
        run, total = learner.run, sum(member.count for member in group.members)
        held = [block for block in group.blocks if block in learner.blocks]
        length = sum(shape.numel() for shape in learner.shapes(held))
        weights = {member.peer: member.count / total for member in group.members if member.count > 0}
        robust = run.averaging.robust and len(weights) >= LEAST_MEMBERS and _are_alike(group, run)
        sums = watched is not None and group.how == How.SUM and SHARED not in group.blocks
        heard = partial(watched.accept, group.blocks) if watched is not None and sums else None
        shares = tuple(member.share for member in group.members if member.count > 0)
        clusters = {member.peer: member.cluster for member in group.members}
        if len(set(clusters.values())) > 1 and not may_cluster(run.averaging):
            raise ProtocolError("the REDUCE uses clusters, but here each contribution must reach the owner of its part")
        forms = self._forms(group, run.averaging)
        return Circle(
            group.number, length, tuple(clusters), weights, shares, clusters, forms, robust, group.warm_start, heard
        )

    def _forms(self, group: Group, averaging: Averaging) -> Forms | None:
        """Return the encodings of each member's values; None if the run does not choose them by line. Raises ProtocolError if one
        is not among the codecs that the run and the swarm allow."""
        if not averaging.by_line:
            return None
        forms = {member.peer: member.form for member in group.members if member.count}
        codecs = {form.codec for form in forms.values()}
        if not codecs <= {*codecs_by_line(averaging, self.codecs)}:
            raise ProtocolError(f"the REDUCE uses codecs {sorted(codecs)}, which the run does not leave to lines")
        own = forms.get(self.peer, Form(averaging.codec))
        return Forms(Codec(own.codec), own.keep, frozenset(map(Codec, codecs)))

    def _call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return self.executor.call(Urgency.CONTROL, function, kind="average", owner=f"step {self._newest.step}")


def _sound_gradient(learner: DeviceLearners, blocks: Blocks) -> FlatVector:
    """Return the gradient of `blocks` as one vector. Raises NotFinite, naming the layer, if it holds NaN or infinity."""
    learner.squared_norm(blocks)
    return learner.gradient(blocks)


def _are_alike(group: Group, run: Run) -> bool:
    """Return whether the contributions estimate the same gradient. Those to the shared block do not if its ends are
    different peers: each end contributes its own gradient of all microbatches."""
    return group.how != How.SUM or sum(member.count for member in group.members) <= run.microbatches


def _new_detector() -> OutlierDetector:
    return OutlierDetector(secrets.token_bytes(SEED_BYTES))
