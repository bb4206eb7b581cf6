"""Trainer of a swarm: joins it as a client, fetches the config and the tokenizer, and feeds the data."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from swarmnode.checkpoints.export import export, runs_by_votes
from swarmnode.checkpoints.states import state_board, survey
from swarmnode.checkpoints.votes import Electorate
from swarmnode.client.observer import SwarmObserver
from swarmnode.client.training.listener import Listener
from swarmnode.client.training.preparation import as_older_versions, check_trains, prepare
from swarmnode.codec.training_messages import NOT_EVALUATED, Lease
from swarmnode.codec.training_messages import StepReport as SwarmReport
from swarmnode.compute.training.datasets.batches import Batches
from swarmnode.compute.training.local import StepSummary
from swarmnode.credit.receipts import ReceiptIssuer
from swarmnode.data.rules import DataRules
from swarmnode.errors import PeerError, UsageError
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
from swarmnode.training.worker.stage import TRAIN_PROTOCOL
from swarmnode.weights.weights import Weights

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
        board = board_of(host, TRAIN_PROTOCOL, on_peer_lost=self._suspect)

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
        """Write the trained model as a checkpoint into `out`, and return the number of its step; see `checkpoints/export.py`."""
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
            self._receipts.note(peer, lease.seal, trained=count * run.positions)

    def _suspect(self, error: PeerError) -> None:
        if error.peer is not None:
            self._host.directory.suspect(error.peer, error.code.name)

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
