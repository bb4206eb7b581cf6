"""Tuner of an adapter that has several trainers, each with data and a route of its own."""

from __future__ import annotations

import asyncio
import math
from dataclasses import KW_ONLY, dataclass, replace

from swarmnode.errors import LeaderLost
from swarmnode.tuning.client.adapter_averaging import Ended, Moved, Partners, TrainerPart
from swarmnode.tuning.client.state_shapes import AdapterState
from swarmnode.tuning.client.tuner import AdapterRoute, AdapterTuner, ComputedStep

MAX_KEPT_BYTES = 256 << 20  # of updates since the last checkpoint


@dataclass(frozen=True)
class _Update:
    """Update that all trainers made: the step, and its mean gradient as files of all layers."""

    done: ComputedStep
    gradient: AdapterState

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.gradient.layers.values()))


@dataclass(eq=False)
class SharedTuner(AdapterTuner):
    """Trainer of an adapter that averages with its `partners`.

    If they average each step, all trainers update by the mean gradient, and keep it until the next checkpoint: after a fault no
    gradient of a finished step is computed again. If they average every N steps, each trains alone in between. A round ends in a
    checkpoint of the mean weights.
    """

    _: KW_ONLY
    partners: Partners

    def __post_init__(self) -> None:
        super().__post_init__()
        self._updates: list[_Update] = []
        self._taught: dict[int, tuple[int, float]] = {}  # labels and mean losses of the round's steps
        self._owed: ComputedStep | None = None  # in a finished round, not reported yet
        self._anchor: AdapterState | None = None  # that all trainers agreed on last
        self._lost: LeaderLost | None = None

    def __repr__(self) -> str:
        return f"<SharedTuner at step {self._step} of {self.run.steps}, {len(self._updates)} kept updates>"

    async def tune(self, stop: asyncio.Event) -> int:
        """Train as `AdapterTuner.tune`. Raises LeaderLost after a checkpoint if the leader has gone."""
        state = await self.partners.begin(stop)
        if state is not None:
            await self._move_to(state)
        steps = await super().tune(stop)
        if self._lost is not None:
            raise self._lost
        return steps

    async def _go_on(self, stop: asyncio.Event) -> None:
        try:
            await super()._go_on(stop)
            if not stop.is_set():
                await self._give_state()
        except Moved as moved:
            await self._move_to(moved.state)
        except Ended as ended:
            self.ended = str(ended)
            stop.set()
        except LeaderLost as lost:
            self._lost = lost
            stop.set()

    async def _move_to(self, state: AdapterState) -> None:
        """Go on from the leader's state."""
        self._updates, self._taught, self._owed = [], {}, None
        self._step, self._reported, self._anchor = state.step, state.step, state
        await self._save(state)
        if self._route is not None:
            await self._route.load(state)

    async def _give_state(self) -> None:
        """Give the state of the present step to trainers that wait for it, between two rounds."""
        anchored = self._anchor is not None and self._anchor.step == self._step
        begins = anchored or self.partners.averaging.every == 1
        if not begins or not self.partners.wants_state or self._step == self.run.steps:
            return
        if self._route is not None and (self.state is None or self.state.step != self._step):
            await self._save(await self._route.fetch(self._step))
        if self.state is not None and self.state.step == self._step:
            self.partners.give(self.state)

    async def _catch_up(self, route: AdapterRoute) -> None:
        for update in self._updates:
            self._report(await self._apply(route, update))
        if self._owed is not None:
            self._report(await self._evaluated(route, self._owed))
        if self._anchor is None and self.partners.averaging.every > 1:
            if self.state is None:
                await self._save(await route.fetch(self._step))
            self._anchor = self.state
        await self._give_state()

    async def _save(self, state: AdapterState) -> None:
        await super()._save(state)
        self._updates = []

    @property
    def _is_checkpoint_due(self) -> bool:
        return super()._is_checkpoint_due or sum(update.size_bytes for update in self._updates) > MAX_KEPT_BYTES

    def _report(self, done: ComputedStep) -> None:
        super()._report(done)
        self._owed = None

    @property
    def _is_over(self) -> bool:
        return super()._is_over and self._owed is None

    @property
    def _pending_updates(self) -> int:
        return len(self._updates)

    async def _update(self, route: AdapterRoute, done: ComputedStep) -> ComputedStep:
        if self.partners.averaging.every == 1:
            return await self._update_together(route, done)
        await self._update_by(route, done.number, done.norm)
        self._taught[done.number] = done.labels, done.loss
        if self.partners.averaging.ends_at(done.number):
            # Go on from the weights that the trainers had in common, plus the mean of their changes.
            assert self._anchor is not None
            state, layout = await route.fetch(self._step), self.partners.layout
            before_N, own_N = layout.vector(self._anchor.layers), layout.vector(state.layers)
            labels = sum(count for count, _ in self._taught.values())
            loss = math.fsum(count * loss for count, loss in self._taught.values()) / max(1, labels)
            mean = await self.partners.average(done.number, TrainerPart(own_N - before_N, labels, loss))
            self._anchor = await asyncio.to_thread(layout.with_weights, state, before_N + mean.vector_N)
            self._taught, self._owed = {}, done
            await self._save(self._anchor)
            await route.load(self._anchor)
        return await self._evaluated(route, done)

    # -- averaging each step

    async def _update_together(self, route: AdapterRoute, done: ComputedStep) -> ComputedStep:
        """Update by the mean gradient of all trainers."""
        own, layout = await route.fetch(done.number, gradients=True), self.partners.layout
        part = TrainerPart(await asyncio.to_thread(layout.vector, own.layers), done.labels, done.loss)
        mean = await self.partners.average(done.number, part)
        done = replace(done, loss=mean.loss, labels=mean.labels, norm=mean.norm)
        files = await asyncio.to_thread(layout.files, mean.vector_N)
        update = _Update(done, AdapterState(done.number, files))
        self._updates.append(update)
        return await self._apply(route, update)

    async def _apply(self, route: AdapterRoute, update: _Update) -> ComputedStep:
        await route.load(update.gradient, gradients=True)
        await self._update_by(route, update.done.number, update.done.norm)
        return await self._evaluated(route, update.done)

    # -- averaging every N steps
