"""Trainer: it feeds a run's microbatches to the swarm and receives the steps' reports. Any number of trainers share the work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame, FrameKind
from swarmnode.codec.messages import End, Error, Fault
from swarmnode.codec.training_messages import (
    Backward,
    Done,
    Failed,
    Forward,
    Labels,
    Lease,
    ProgressReport,
    Release,
    StepReport,
    Stopped,
    Work,
)
from swarmnode.compress.codecs import encode_values
from swarmnode.compute.training.datasets.batches import Batches
from swarmnode.compute.training.saved_activations import has_nan, is_finite
from swarmnode.errors import (
    ErrorCode,
    NotFinite,
    PeerError,
    PeerLost,
    PeerRefused,
    StepFailed,
    SwarmnodeError,
    UsageError,
    refusal,
)
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.clock import Backoff
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.swarm.records.run import Run, encode_run
from swarmnode.training.coordinator.link_times import CLEANUP, LASTING, SILENCE_S, STALLED_S
from swarmnode.training.coordinator.worker_group import sentence

log = logging.getLogger(__name__)

WANT = 32  # microbatches at a time
RETRY_S = 0.3
TICK_S = 0.5
EXCUSED = 4  # factor on the time without work that has an excuse


@dataclass(eq=False)
class Trainer:
    """A trainer of one run.

    `coordinators` returns the peers that may lead, the likeliest first. `on_step` is called with each step's report.
    `on_waiting` is called, once a second while training stands still, with a sentence that says why, and the layers without
    a holder. `on_done` is called with the lease of each completed microbatch.
    """

    switchboard: Switchboard
    coordinators: Callable[[], list[PeerId]]
    run: Run
    batches: Batches
    on_step: Callable[[StepReport], None]
    on_waiting: Callable[[str, tuple[int, ...]], None] = lambda _text, _missing: None
    on_done: Callable[[Lease], None] = lambda _lease: None

    def __post_init__(self) -> None:
        self.next_step = 0
        self.last_failure = ""  # of a microbatch, as a sentence
        self.left_out: set[PeerId] = set()  # peers that are found to send what they do not compute
        self._backoff = Backoff(asyncio.get_running_loop().time)  # for peers that do not answer

    def __repr__(self) -> str:
        return f"<Trainer at step {self.next_step} of {self.run.steps}>"

    async def train(self, stop: asyncio.Event) -> int:
        """Feed microbatches until the run is over or `stop` is set, and return the number of steps done.

        Raises UsageError if the swarm is in another run, and NotFinite if the loss or a gradient is NaN or infinite, the data
        hold NaN or the labels infinity. Raises StepFailed if a step fails at all peers that could compute it.
        """
        named: PeerId | None = None
        while not stop.is_set():
            for peer in self._candidates(named):
                session = _FeedingSession(self, peer)
                stopped = await session.work(stop)
                named = session.redirected
                if stopped is not None:
                    return self._finish(stopped)
                if session.failed is not None:
                    self._backoff.failed(peer)
                    self.on_waiting(f"no peer coordinates the training: {session.failed}", ())
                if named is not None or stop.is_set():
                    break
            if named is None or self._backoff.pause_s(named):  # no peer was named, or one that has just failed
                await asyncio.sleep(RETRY_S)
        return self.next_step

    def _candidates(self, named: PeerId | None) -> list[PeerId]:
        """Return the peer that is said to lead, else all that may lead; peers that did not answer lately come last."""
        if named is not None and not self._backoff.pause_s(named):
            return [named]
        return sorted(self.coordinators(), key=lambda peer: self._backoff.pause_s(peer) > 0)

    def _finish(self, stopped: Stopped) -> int:
        if stopped.code == ErrorCode.NOT_FINITE:
            where = f"layer {stopped.unit}" if stopped.unit >= 0 else "the embedding that the ends share"
            raise NotFinite(
                f"step {stopped.step}: the loss or the gradient is NaN or infinite, first seen at {where}; the swarm keeps "
                "the step before. Lower --lr or --clip, or look at the data. If these are sound, a machine sends false numbers: "
                "let another one hold the same layers, so that the false one is found",
                unit=stopped.unit,
            )
        if stopped.code:
            why = self.last_failure or str(refusal(stopped.code))
            raise StepFailed(
                f"step {stopped.step} fails at every peer that holds "
                f"layer {stopped.unit}, at last: {why}; the swarm keeps the "
                "step before"
            )
        return stopped.step

    def receive_report(self, news: StepReport | ProgressReport) -> None:
        """Pass on a report. Each step is reported once, whichever coordinator reports it."""
        if isinstance(news, ProgressReport):
            # Log a warning once for each peer that is newly left out of the training.
            for peer in set(news.left_out) - self.left_out:
                log.warning("peer %s is left out of the training: what it sends is not what it computes", peer)
            self.left_out.update(news.left_out)
            if text := sentence(news):
                self.on_waiting(text, news.missing)
        elif news.step >= self.next_step:
            self.next_step = news.step + 1
            self.on_step(news)


class _FeedingSession:
    """A trainer's work for one coordinator. `redirected`: the peer that leads instead, by its answer; `failed`: why it
    should not be asked again soon."""

    def __init__(self, trainer: Trainer, coordinator: PeerId) -> None:
        self.redirected: PeerId | None = None
        self.failed: str | None = None
        self._trainer = trainer
        self._run = trainer.run
        self._switchboard = trainer.switchboard
        self._coordinator = coordinator
        self._channel: Channel | None = None
        self._over: asyncio.Future[Stopped | None] = asyncio.get_running_loop().create_future()
        self._feeding = Tasks("trainer", on_crash=self._crashed)
        self._leases: dict[int, asyncio.Task[None]] = {}
        self._silent_ticks = self._idle_ticks = 0
        self._excused = False

    async def work(self, stop: asyncio.Event) -> Stopped | None:
        """Feed microbatches until the coordinator says that the run is over, and return its message.

        Returns None if the coordinator is lost, silent or does not lead, or on `stop`. Raises UsageError if the swarm is in
        another run, NotFinite if the data hold NaN.
        """
        stopping = asyncio.ensure_future(stop.wait())
        stopping.add_done_callback(lambda _: self._end(None))
        try:
            self._channel = await self._switchboard.call(self._coordinator, self._receive, self._lose)
            self._channel.send(Work(encode_run(self._run), WANT, self._trainer.next_step))
            self._feeding.spawn(self._watch_silence(), "silence")
            return await self._over
        except PeerRefused as error:
            if error.code == ErrorCode.WRONG_RUN:
                raise UsageError(
                    "the swarm is in the middle of a training with other settings or other data; go on with those, "
                    "or found another swarm"
                ) from None
            if error.code == ErrorCode.MALFORMED:
                self.failed = (
                    f"peer {self._coordinator} refuses the run; if its version is older, update swarmnode there"
                )
            return None
        except NotFinite:
            raise
        except SwarmnodeError as error:
            log.info("coordinator %s: %s", self._coordinator, error)
            self.failed = str(error)
            return None
        finally:
            stopping.cancel()
            self._over.cancel()
            await self._feeding.close()
            if self._channel is not None:
                self._channel.close()

    async def _watch_silence(self) -> None:
        """End the session if the coordinator is silent, or gives no work for too long. It counts ticks, since a suspended
        process hears nothing."""
        fault = None
        while fault is None:
            await asyncio.sleep(TICK_S)
            self._silent_ticks += 1
            self._idle_ticks = 0 if self._leases else self._idle_ticks + 1
            fault = self._fault()
        self._lose(PeerLost(f"peer {self._coordinator} {fault}", peer=self._coordinator))

    def _fault(self) -> str | None:
        """Return the coordinator's fault, or None. Missing holders and expected peers excuse it for a while only: it may be
        wrong."""
        if self._silent_ticks * TICK_S >= SILENCE_S:
            return f"says nothing for {SILENCE_S:.0f} s"
        idle_s = self._idle_ticks * TICK_S
        return f"has no work for {idle_s:.0f} s" if idle_s >= STALLED_S * (EXCUSED if self._excused else 1) else None

    def _lose(self, error: PeerError) -> None:
        self.failed = str(error)
        self._end(None)

    def _crashed(self, error: BaseException) -> None:
        """End the session with `error`, a bug in the code that sends samples."""
        if not self._over.done():
            self._over.set_exception(error)

    def _end(self, result: Stopped | None) -> None:
        if not self._over.done():
            self._over.set_result(result)

    def _receive(self, _frame: Frame, body: Body) -> None:
        self._silent_ticks = 0
        if isinstance(body, StepReport | Stopped | Release) and body.run != self._run.id:
            log.info("coordinator %s reports another run", self._coordinator)
        elif (hear := FROM_COORDINATOR.get(type(body))) is not None:
            hear(self, body)

    def _redirect(self, body: Failed) -> None:
        self.redirected = body.peer if body.code == ErrorCode.ELSEWHERE else None
        self._end(None)

    def _refused(self, body: Error) -> None:
        if not self._over.done():
            self._over.set_exception(refusal(body.code, peer=self._coordinator))

    def _record_step(self, news: StepReport) -> None:
        self._idle_ticks = 0
        self._trainer.receive_report(news)

    def _record_progress(self, news: ProgressReport) -> None:
        self._excused = bool(news.missing) or any(wait.what == FrameKind.WORK for wait in news.waits)
        self._trainer.receive_report(news)

    def _release(self, body: Release) -> None:
        for lease in body.leases:
            if lease in self._leases:
                self._leases[lease].cancel()

    def _accept_lease(self, lease: Lease) -> None:
        if lease.run != self._run.id:
            self._tell(Failed(lease.lease, "", ErrorCode.WRONG_RUN, run=self._run.id))
            return
        task = self._leases[lease.lease] = self._feeding.spawn(self._feed(lease), f"lease {lease.lease}")
        task.add_done_callback(lambda _task: self._leases.pop(lease.lease, None))

    async def _feed(self, lease: Lease) -> None:
        """Send one microbatch, wait for its result, and report the result to the coordinator."""
        try:
            done = await asyncio.wait_for(self._send(lease), CLEANUP * lease.within_s or None)
            self._tell(Done(lease.lease, done.loss, self._run.id, done.expert_load))
            self._trainer.on_done(lease)
        except asyncio.TimeoutError:
            self._tell(Failed(lease.lease, lease.route[0].peer, ErrorCode.PEER_LOST, run=self._run.id))
        except PeerError as error:
            code = error.code if isinstance(error, PeerRefused) else ErrorCode.PEER_LOST
            if code in LASTING:
                self._trainer.last_failure = str(error)
            self._tell(Failed(lease.lease, error.peer or "", code, run=self._run.id))
            if code == ErrorCode.NOT_FINITE:
                await asyncio.to_thread(self._check_data, lease)

    def _check_data(self, lease: Lease) -> None:
        """Raise NotFinite if the inputs hold NaN, or the labels NaN or infinity: then another peer would not help."""
        inputs, labels = self._trainer.batches.microbatch(lease.step, lease.number, self._run)
        if (nan := has_nan(inputs)) or not is_finite(labels):
            what = "data hold NaN" if nan else "labels hold NaN or infinity"
            raise NotFinite(f"step {lease.step}, microbatch {lease.number}: the {what}; check the dataset", unit=0)

    def _tell(self, body: Body) -> None:
        if self._channel is not None and self._channel.open:
            self._channel.send(body)

    async def _send(self, lease: Lease) -> Backward:
        """Send the inputs and labels of a lease and return the result. Raises PeerError if a hop is lost or fails."""
        answer: asyncio.Future[Backward] = asyncio.get_running_loop().create_future()
        route = lease.route
        first, last = route[0], route[-1]
        # One hop may fail while another is called.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())

        def fail(error: Exception) -> None:
            if not answer.done():
                answer.set_exception(error)

        def receive(_frame: Frame, body: Body) -> None:
            if isinstance(body, Backward) and body.run != lease.run:
                fail(refusal(ErrorCode.WRONG_RUN, peer=first.peer))
            elif isinstance(body, Backward) and not answer.done():
                answer.set_result(body)
            elif isinstance(body, Fault):
                fail(refusal(body.code, peer=route[min(body.index, len(route) - 1)].peer))
            elif isinstance(body, End | Error):
                fail(refusal(ErrorCode.PEER_LOST, peer=first.peer))

        def receive_last(_frame: Frame, body: Body) -> None:
            if isinstance(body, Fault | Error | End):
                fail(refusal(getattr(body, "code", ErrorCode.PEER_LOST), peer=last.peer))

        inputs, labels = await asyncio.to_thread(self._trainer.batches.microbatch, lease.step, lease.number, self._run)
        told = {name: getattr(lease, name) for name in FROM_LEASE} | {"feeder": self._switchboard.peer_id}
        with ExitStack() as channels:
            for values, peer, heard in ((labels, last.peer, receive_last), (inputs, first.peer, receive)):
                infos, payload = encode_values(values)
                channel = await self._switchboard.call(peer, heard, fail)
                channels.callback(channel.close)
                frame = Labels(values=infos, **told) if heard is receive_last else Forward(hop=0, values=infos, **told)
                channel.send(frame, payload=payload)
            return await answer


FROM_LEASE = ("term", "lease", "step", "number", "route", "run", "within_s", "seal")
"""Fields that FORWARD and LABELS copy from the lease; its seal proves to the hops that it is this trainer's."""

FROM_COORDINATOR: Mapping[type[Body], Callable[[_FeedingSession, Any], None]] = {
    Lease: _FeedingSession._accept_lease,
    Release: _FeedingSession._release,
    StepReport: _FeedingSession._record_step,
    ProgressReport: _FeedingSession._record_progress,
    Stopped: _FeedingSession._end,
    Failed: _FeedingSession._redirect,
    Error: _FeedingSession._refused,
    End: lambda session, _body: session._end(None),
}
"""Handlers of the coordinator's messages to a trainer (`docs/training-step.md`)."""
