"""Trainer of a swarm: joins it as a client, fetches the config and the tokenizer, and feeds the data.

Listeners of a training's progress, and its metrics.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from swarmnode.checkpoints.checkpoint_export import export, runs_by_votes
from swarmnode.checkpoints.state_exchange import state_board, survey
from swarmnode.checkpoints.votes import Electorate
from swarmnode.client.observer import SwarmObserver
from swarmnode.client.training.preparation import as_older_versions, check_exports, check_trains, prepare
from swarmnode.codec.training_messages import NOT_EVALUATED, Lease
from swarmnode.codec.training_messages import StepReport as SwarmReport
from swarmnode.compute.training.datasets.batches import Batches
from swarmnode.compute.training.local import StepSummary
from swarmnode.credit.receipts import ReceiptIssuer
from swarmnode.data.samples import DataRules, DataSummary
from swarmnode.errors import UsageError
from swarmnode.metrics import table
from swarmnode.metrics.metric import Histogram, Reading, Readings
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host, joining
from swarmnode.peer.questions import board_of
from swarmnode.platform import MACHINE, Platform
from swarmnode.swarm.records.invite import Role
from swarmnode.swarm.records.run import Run, differences
from swarmnode.swarm.storage.content import Progress
from swarmnode.swarm.storage.swarmfile import Swarm
from swarmnode.training.coordinator.election import ready_peers
from swarmnode.training.trainer import Trainer
from swarmnode.training.worker.training_stage import TRAIN_PROTOCOL
from swarmnode.weights.weights import Weights


class Listener(Protocol):
    """Listener of a training's progress. Its methods are called in the event loop's thread and must not block."""

    def begun(self, run: Run, data: DataSummary) -> None:
        """Report that the data has been read.

        Args:
            run: All settings of the run.
            data: What the data holds, and how often the run passes it.
        """

    def step(self, report: StepSummary) -> None:
        """Report that a step is finished.

        Args:
            report: Loss, time and peers of the step.
        """

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        """Report that the training waits.

        Args:
            why: A sentence that gives the reason.
            missing: The layers without a holder; may be empty.
        """


class ListenerChain:
    """Listener that passes everything on to another `listener`. Base class of listeners that act on some of it."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def begun(self, run: Run, data: DataSummary) -> None:
        """Pass the settings on."""
        self._listener.begun(run, data)

    def step(self, report: StepSummary) -> None:
        """Pass a finished step on."""
        self._listener.step(report)

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        """Pass the reason on."""
        self._listener.waiting(why, missing)


class EarlyStopping(ListenerChain):
    """Listener that passes everything on to another listener, and calls `stop` after `patience` evaluations without a lower loss of
    held-out data (0: never). `stopped` says why, and is empty before."""

    def __init__(self, listener: Listener, patience: int) -> None:
        super().__init__(listener)
        self.stopped = ""
        self.stop: Callable[[], None] = lambda: None
        self._patience = patience
        self._best: tuple[float, int] = (math.inf, 0)  # loss, and its step
        self._worse = 0

    def step(self, report: StepSummary) -> None:
        """Pass a step on, and stop if its held-out loss is one too many that is no lower."""
        super().step(report)
        if report.held_out_loss is None:
            return
        self._best = min(self._best, (report.held_out_loss, report.step))
        self._worse = 0 if self._best[1] == report.step else self._worse + 1
        if self._patience and self._worse >= self._patience and not self.stopped:
            loss, step = self._best
            self.stopped = f"the held-out loss was lowest, {loss:.4f}, at step {step}"
            self.stop()


class TrainerMeter(ListenerChain):
    """Listener that passes everything on to another listener and counts it for Prometheus. `last` is the summary of the last
    finished step; None before the first one."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener)
        self.last: StepSummary | None = None
        self._waiting = False
        self._step_s = Histogram()
        self._tokens = 0

    def step(self, report: StepSummary) -> None:
        """Count a finished step, and pass the report on."""
        self.last, self._waiting = report, False
        self._tokens += report.tokens
        if report.step_s:  # 0 if the coordinator was lost before it could report
            self._step_s.observe(report.step_s)
        super().step(report)

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        """Note that the training waits, and pass the reason on."""
        self._waiting = True
        super().waiting(why, missing)

    def readings(self) -> Readings:
        """Yield the metrics of the trainer: waiting time, tokens and, after the first step, its results."""
        yield Reading(table.TRAINER_WAITING, self._waiting)
        yield Reading(table.TRAINER_TOKENS, self._tokens)
        yield Reading(table.TRAINER_STEP_SECONDS, self._step_s)
        if self.last is not None:
            yield Reading(table.TRAINER_STEP, self.last.step)
            yield Reading(table.TRAINER_LOSS, self.last.loss)
            yield Reading(table.TRAINER_EXPERT_LOAD, self.last.expert_load)
            yield Reading(table.TRAINER_PEERS, self.last.peers)
            yield Reading(table.TRAINER_EXPECTED_SECONDS, self.last.expected_s)


log = logging.getLogger(__name__)


class TrainingClient(SwarmObserver):
    """Client that trains a swarm's model. Create it with `join`, end it with `close`."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._weights = Weights(host)
        self._receipts = ReceiptIssuer(host)
        self.fed = 0  # microbatches that this trainer has fed

    @classmethod
    async def join(
        cls, swarm: Swarm, home: Path, *, patience_s: float = 60.0, platform: Platform = MACHINE
    ) -> TrainingClient:
        """Join the swarm as a client. Raises NetworkDown if no peer answers, NotAdmitted, UsageError if the swarm does not
        train."""
        async with joining(swarm, home, patience_s=patience_s, platform=platform) as host:
            await host.manifest(patience_s=patience_s)
            self = cls(host)
            check_trains(self.manifest)
        return self

    async def founded(self) -> Path:
        """Return a folder with all files that the swarm was founded with."""
        return await self._weights.everything()

    async def train(
        self, data: Path, settings: Run, listener: Listener, stop: asyncio.Event, rules: DataRules = DataRules()
    ) -> int:
        """Feed the data until the run is over or `stop` is set, and return the number of finished steps.

        Raises UsageError if data and settings do not fit the model or the swarm's present run, NotFinite, NotAdmitted.
        """
        self._host.check_welcome(Role.TRAINER)
        folder = await self._weights.small_files()
        what = (self.manifest, folder, data, settings, rules)
        run, batches = await asyncio.to_thread(prepare, *what)
        listener.begun(run, batches.summary(run))
        host = self._host
        board = board_of(host, TRAIN_PROTOCOL, on_peer_lost=host.lost_neighbour)

        def coordinators() -> list[PeerId]:
            ready = ready_peers(host.directory)
            if not ready:
                listener.waiting("no machine of the swarm is ready", ())
            return ready

        async def feed(run: Run, batches: Batches) -> int:
            on_step, on_done = _telling(listener, run, batches), functools.partial(self._sign, run)
            trainer = Trainer(board, coordinators, run, batches, on_step, listener.waiting, on_done)
            return await host.supervisor.watch(trainer.train(stop))

        try:
            return await feed(run, batches)
        except UsageError as error:
            others = await self._others_runs()
            older = await asyncio.to_thread(as_older_versions, *what) if others else []
            for earlier, same in older:
                if earlier in others:
                    return await feed(earlier, same)
            told = next(filter(None, (differences(run, other) for other in others)), [])
            raise UsageError(f"{error}. {' '.join(told)}" if told else str(error)) from None
        finally:
            await board.close()

    async def export(
        self,
        out: Path,
        *,
        force: bool,
        patience_s: float,
        average: bool = True,
        progress: Progress | None = None,
        on_unconfirmed: Callable[[Sequence[str]], None] = lambda _parts: None,
    ) -> int:
        """Write the trained model as a checkpoint into `out`, and return the number of its step; see
        `checkpoints/checkpoint_export.py`. Raises UsageError if the model has a bottleneck."""
        check_exports(self.manifest)
        return await export(
            self._host,
            out,
            progress,
            force=force,
            patience_s=patience_s,
            average=average,
            on_unconfirmed=on_unconfirmed,
        )

    async def close(self) -> None:
        """Leave the swarm."""
        await self._receipts.close()
        await self._weights.close()
        await self._host.close()

    def _sign(self, run: Run, lease: Lease) -> None:
        """Count a finished microbatch, and give a receipt to each peer that took part in it."""
        self.fed += lease.step < run.steps  # an evaluation of the final weights is no training
        units: Counter[PeerId] = Counter()
        for hop in lease.route:
            units[hop.peer] += hop.end - hop.start
        for peer, count in units.items():
            self._receipts.record(peer, lease.seal, trained=count * run.positions)

    async def _others_runs(self) -> list[Run]:
        """Return the runs of the states that holders list, or keepers of backups if there are no holders, the run with most votes
        first; empty if no peer answers."""
        board = state_board(self._host)
        try:
            listings = await survey(board, self._host.directory.peers())
        finally:
            await board.close()
        return runs_by_votes(listings, Electorate.of(self._host.directory))


def _telling(listener: Listener, run: Run, batches: Batches) -> Callable[[SwarmReport], None]:
    """Return a function that passes the coordinator's reports on to the listener."""

    def tell(report: SwarmReport) -> None:
        tokens = batches.tokens(report.step, run)
        summary = StepSummary(report.step, report.loss, report.step_s, tokens, report.peers, report.norm)
        held_out_loss = None if report.held_out_loss == NOT_EVALUATED else report.held_out_loss
        listener.step(
            replace(summary, expected_s=report.expected_s, held_out_loss=held_out_loss, expert_load=report.expert_load)
        )

    return tell
