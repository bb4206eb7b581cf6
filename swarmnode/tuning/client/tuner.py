"""Tuner: the steps of an adapter's training, its checkpoints, and the way back to the last one after a fault.

The content of microbatch `number` of a step is a pure function of the data, the run and the two numbers. So steps that are computed
again after a fault give what they would have given without it.

State of a tuning on the owner's disk: the last checkpoint, with the settings that it belongs to.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol

import msgspec
from torch import Tensor

from swarmnode.codec.body import DECODE_ERRORS, HopSpec
from swarmnode.codec.tuning_messages import AdapterOpened
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.compute.training.adapters.held_ends import count_labels
from swarmnode.compute.training.datasets.batches import Batches
from swarmnode.compute.training.local import StepSummary
from swarmnode.compute.training.optimizer import clip_factor
from swarmnode.compute.training.segment import Values
from swarmnode.data.rows import NO_LABEL
from swarmnode.errors import LocalError, NetworkDown, PeerError, ProtocolError, UsageError
from swarmnode.files import write_private
from swarmnode.net.tasks import until_first
from swarmnode.swarm.records.run import Run, differences, encode_run
from swarmnode.tuning.client.state_shapes import AdapterState
from swarmnode.tuning.client.tuned_route import TunedMicrobatch

log = logging.getLogger(__name__)


class AdapterRoute(Protocol):
    """Place that computes an adapter's steps: hops of a swarm (`TunedRoute`), or this process (`LocalRoute`)."""

    @property
    def leaving(self) -> bool:
        """Whether a hop asks to be left after the present step."""

    @property
    def sizes(self) -> list[tuple[HopSpec, AdapterOpened]]:
        """The hops with the bytes that each keeps."""

    async def compute(self, step: int, microbatches: Sequence[TunedMicrobatch]) -> dict[int, tuple[float, int]]:
        """Return for each microbatch the sum of its labels' losses, and their number."""

    async def forward(self, step: int, number: int, inputs: Values, *, learns: bool) -> Tensor:
        """Return the outputs of layers without the model's ends. A microbatch that `learns` then waits for `backward` or `drop`."""

    async def backward(self, step: int, number: int, gradient_BTH: Tensor) -> Tensor:
        """Return the gradient of a microbatch's hidden states from that of its outputs, and count the adapter's gradients."""

    async def drop(self, step: int, number: int) -> None:
        """Forget a microbatch that waits for its gradient."""

    async def gradient(
        self, step: int, microbatches: Sequence[TunedMicrobatch]
    ) -> tuple[dict[int, tuple[float, int]], float]:
        """Return what `compute` does, and the norm of the step's gradient, which is of the microbatches that learn."""

    async def update(self, step: int, learning_rate: float, scale: float) -> None:
        """Order an update of the adapter with its gradient times `scale`. A failure may show only at the next call."""

    async def fetch(self, step: int, *, gradients: bool = False) -> AdapterState:
        """Return the state at the beginning of `step`, or the sums of gradients in it."""

    async def load(self, state: AdapterState, *, gradients: bool = False) -> None:
        """Go on from a state, without gradients; or replace the sums of gradients, and nothing else."""

    async def close(self) -> None:
        """Free the adapter."""


class RouteOpener(Protocol):
    """Source of routes for one adapter."""

    async def open(self, state: AdapterState | None) -> AdapterRoute:
        """Open the adapter on a route, with `state` if there is one. Raises PeerError if a hop fails, NoRoute if there is none."""

    def failed(self, error: PeerError | NetworkDown) -> None:
        """Note why the last route failed. Raises NotFinite or UsageError if no other route would help."""

    def succeeded(self) -> None:
        """Note that the last route has finished a step that none had finished before."""


@dataclass(frozen=True)
class ComputedStep:
    """Step whose gradient the route has: its mean loss over `labels` labels, and the norm of the gradient before clipping.

    `held_out` has the losses and labels of held-out microbatches. `began_s` and `ended_s` are the times of its begin and its end.
    """

    number: int
    loss: float
    labels: int
    norm: float
    held_out: Sequence[tuple[float, int]]
    began_s: float
    ended_s: float = 0.0


@dataclass(eq=False)
class AdapterTuner:
    """Trainer of one adapter. `state` is the last checkpoint, None before the first; `on_state` is called with each new one."""

    opener: RouteOpener
    recipe: AdapterRecipe
    run: Run
    batches: Batches
    on_step: Callable[[StepSummary], None]
    on_open: Callable[[AdapterRoute], None]
    on_state: Callable[[AdapterState], Awaitable[None]]
    clock: Callable[[], float]
    state: AdapterState | None = None

    def __post_init__(self) -> None:
        self.ended = ""  # why another trainer ended the tuning before its last step
        self.rewinds = 0
        self.steps_lost = 0  # computed again after faults
        self.fault = ""  # of the last route
        self._step = 0 if self.state is None else self.state.step
        self._reported = self._step
        self._route: AdapterRoute | None = None

    def __repr__(self) -> str:
        return f"<AdapterTuner at step {self._step} of {self.run.steps}, {self.rewinds} rewinds>"

    async def tune(self, stop: asyncio.Event) -> int:
        """Train until the run is over or `stop` is set. Returns the step of the last checkpoint.

        Raises NotFinite, UsageError, NoRoute, Busy. The last checkpoint stands then.
        """
        try:
            while not self._is_over and not (stop.is_set() and self._saved_step == self._step):
                try:
                    await self._go_on(stop)
                except (PeerError, NetworkDown) as error:
                    # Go back to the last checkpoint after a fault of the route.
                    log.info("%r: %s", self, error)
                    self.rewinds += self._route is not None
                    self.fault = str(error)
                    await self._leave()
                    self.steps_lost += max(
                        0, min(self._step, self._reported) - self._saved_step - self._pending_updates
                    )
                    self._step = self._saved_step
                    self.opener.failed(error)
                    if stop.is_set():
                        break
        finally:
            await self._leave()
        return self._saved_step

    @property
    def _is_over(self) -> bool:
        return self._saved_step == self.run.steps

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self._step

    @property
    def _saved_step(self) -> int:
        return 0 if self.state is None else self.state.step

    async def _go_on(self, stop: asyncio.Event) -> None:
        """Compute a step, unless `stop` is set, fetch a checkpoint if one is due, and report the step."""
        route = self._route or await self._open(stop)
        if route is None:
            return
        is_over = stop.is_set() or self._step == self.run.steps
        done = None if is_over else await self._update(route, await self._compute(route))
        ended_s = self.clock()
        if self._saved_step < self._step and (self._is_checkpoint_due or route.leaving or stop.is_set()):
            await self._save(await route.fetch(self._step))
        if done is not None:
            self._report(replace(done, ended_s=ended_s))
        if route.leaving:
            await self._leave()

    async def _open(self, stop: asyncio.Event) -> AdapterRoute | None:
        """Open the adapter with the last checkpoint, and return its route; None if `stop` is set first."""
        opening = asyncio.ensure_future(self.opener.open(self.state))
        await until_first(opening, stop.wait())
        if opening.cancelled():
            return None
        self._route = opening.result()
        self.on_open(self._route)
        self.fault = ""
        await self._catch_up(self._route)
        return self._route

    async def _catch_up(self, route: AdapterRoute) -> None:
        """Do what a route that was just opened needs beside its state: nothing here."""

    @property
    def _is_checkpoint_due(self) -> bool:
        return self.run.is_checkpoint(self._step)

    async def _save(self, state: AdapterState) -> None:
        self.state = state
        await self.on_state(state)

    async def _compute(self, route: AdapterRoute) -> ComputedStep:
        """Have the route compute the losses and the gradient of the present step."""
        step, began_s = self._step, self.clock()
        microbatches = await self._microbatches()
        found, norm = await route.gradient(step, microbatches)
        self._check_labels(route, microbatches, found)
        learnt = [one for one in microbatches if one.learns]
        loss = math.fsum(found[one.number][0] * one.share for one in learnt)
        labels = sum(int((one.labels[0] != NO_LABEL).sum()) for one in learnt)
        held_out = [found[one.number] for one in microbatches if not one.learns]
        return ComputedStep(step, loss, labels, norm, held_out, began_s)

    async def _update(self, route: AdapterRoute, done: ComputedStep) -> ComputedStep:
        """Update the adapter by the gradient of a step. Returns the step as it has to be reported."""
        await self._update_by(route, done.number, done.norm)
        return await self._evaluated(route, done)

    async def _update_by(self, route: AdapterRoute, step: int, norm: float) -> None:
        """Update the adapter by the gradient at the route, whose norm is `norm`."""
        await route.update(step, self.run.learning_rate_at(step), clip_factor(self.recipe.clip, norm))
        self._step = step + 1

    async def _evaluated(self, route: AdapterRoute, done: ComputedStep) -> ComputedStep:
        """Return the step, whose update is done; the last one with the losses of held-out data by the final weights."""
        if self._step < self.run.steps or not self.run.passes(self.run.steps):
            return done
        microbatches = await self._microbatches()
        found = await route.compute(self.run.steps, microbatches)
        self._check_labels(route, microbatches, found)
        return replace(done, held_out=[*found.values()])

    async def _microbatches(self) -> list[TunedMicrobatch]:
        """Return the microbatches of the present step."""
        return [await asyncio.to_thread(self._microbatch, number) for number in self.run.passes(self._step)]

    def _check_labels(
        self, route: AdapterRoute, microbatches: Sequence[TunedMicrobatch], results: Mapping[int, tuple[float, int]]
    ) -> None:
        """Raise ProtocolError if the last hop counted other labels than the microbatches have."""
        if any(results[one.number][1] != self._count(one.labels[0]) for one in microbatches):
            raise ProtocolError("the last hop counted other labels", peer=route.sizes[-1][0].peer)

    def _count(self, labels_BS: Tensor) -> int:
        return count_labels(labels_BS, self.recipe.prompt_positions)

    def _report(self, done: ComputedStep) -> None:
        """Report a step, unless it was reported before a fault: else the faults of a later step would be forgiven each time."""
        if done.number < self._reported:
            return
        assert self._route is not None
        self._reported = done.number + 1
        self.opener.succeeded()
        step_s = (done.ended_s or self.clock()) - done.began_s
        tokens = self.batches.tokens(done.number, self.run)
        peers = len({hop.peer for hop, _ in self._route.sizes})
        summary = StepSummary(done.number, done.loss, step_s, tokens, peers, done.norm)
        if done.held_out:
            labels = sum(count for _, count in done.held_out)
            summary = replace(summary, held_out_loss=math.fsum(loss for loss, _ in done.held_out) / max(1, labels))
        self.on_step(summary)

    def _microbatch(self, number: int) -> TunedMicrobatch:
        """Return a microbatch of the present step, whose mean over labels counts as in a training of all weights."""
        run = self.run
        inputs, labels = self.batches.microbatch(self._step, number, run)
        learns = number < run.microbatches
        share = float(labels[1]) if learns and run.weighs_labels else 1.0
        share /= run.microbatches * max(1, self._count(labels[0]))
        return TunedMicrobatch(number, inputs, labels[:1], share, learns)

    @property
    def _pending_updates(self) -> int:
        """Number of updates since the last checkpoint that are kept here, so that no gradient is computed again for them."""
        return 0

    async def _leave(self) -> None:
        route, self._route = self._route, None
        if route is not None:
            await route.close()


class _Saved(msgspec.Struct, frozen=True):
    base: bytes  # id of the swarm
    recipe: AdapterRecipe
    run: bytes
    step: int
    layers: dict[int, bytes]


class SavedTuning:
    """File with the last checkpoint of a tuning of an adapter for the swarm `base`."""

    def __init__(self, path: Path, base: bytes, recipe: AdapterRecipe, run: Run) -> None:
        self.path = path
        self._base = base
        self._recipe = recipe
        self._run = run

    def __repr__(self) -> str:
        return f"SavedTuning({self.path})"

    def load(self) -> AdapterState | None:
        """Return the checkpoint; None if there is no file.

        Raises UsageError if it is of another base model, adapter or run, or no state of a tuning; LocalError if it cannot be read.
        """
        try:
            saved = msgspec.msgpack.decode(self.path.read_bytes(), type=_Saved)
            run = msgspec.msgpack.decode(saved.run, type=Run)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LocalError(f"cannot read {self.path}: {error.strerror or error}; choose another --out") from error
        except (*DECODE_ERRORS, UsageError):
            raise UsageError(f"{self.path} holds no state of a tuning: remove it, or choose another --out") from None
        advice = f"give the same, another --out, or remove {self.path} to begin anew"
        if saved.base != self._base:
            raise UsageError(f"{self.path} holds an adapter of another swarm's model: {advice}")
        for field in fields(AdapterRecipe):
            here, there = getattr(self._recipe, field.name), getattr(saved.recipe, field.name)
            if here != there:
                words = field.name.replace("_", " ")
                raise UsageError(f"{self.path} holds an adapter whose {words} is {there}, not {here}: {advice}")
        if run.id != self._run.id:
            told = " ".join(differences(self._run, run)) or "Its settings differ."
            raise UsageError(f"{self.path} holds a tuning with other settings or data. {told} G{advice[1:]}")
        return AdapterState(saved.step, saved.layers)

    def save(self, state: AdapterState) -> None:
        """Write a checkpoint in place of the one before, flushed to the disk. Raises LocalError if it cannot be written."""
        saved = _Saved(self._base, self._recipe, encode_run(self._run), state.step, dict(state.layers))
        write_private(self.path, msgspec.msgpack.encode(saved))
