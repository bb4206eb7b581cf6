"""Trainer: feeds a run's microbatches to the swarm and hears how each step went. Any number share the work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, End, Error, Fault
from swarmnode.codec.training_messages import Backward, Done, Failed, Forward, Lease, StepReport, Stopped, Work
from swarmnode.compute.training.datasets.batches import Batches
from swarmnode.errors import ErrorCode, NotFinite, PeerError, PeerRefused, SwarmnodeError, UsageError, refusal
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Channel, Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.roles.training.worker.values import encode_values
from swarmnode.swarm.records.run import Run, encode_run

log = logging.getLogger(__name__)

WANT = 32  # microbatches at a time
RETRY_S = 0.3


class Trainer:
    """`coordinators` yields the peers that may lead, the likeliest first. `train` returns when all steps are done."""

    def __init__(
        self,
        switchboard: Switchboard,
        coordinators: Callable[[], list[PeerId]],
        run: Run,
        batches: Batches,
        on_step: Callable[[StepReport], None],
    ) -> None:
        self._switchboard = switchboard
        self._coordinators = coordinators
        self._run = run
        self._batches = batches
        self._on_step = on_step
        self._next_step = 0

    def __repr__(self) -> str:
        return f"<Trainer at step {self._next_step} of {self._run.steps}>"

    async def train(self, stop: asyncio.Event) -> int:
        """Feed until the run is over or `stop` is set; the steps done. Raises UsageError where the swarm is in another run,
        NotFinite where the loss is."""
        named: PeerId | None = None
        while not stop.is_set():
            for peer in [named] if named is not None else self._coordinators():
                session = _FeedingSession(self._switchboard, peer, self._run, self._batches, self._report)
                stopped = await session.work(self._next_step, stop)
                named = session.redirected
                if stopped is not None:
                    return self._finish(stopped)
                if named is not None or stop.is_set():
                    break
            else:
                await asyncio.sleep(RETRY_S)
        return self._next_step

    def _finish(self, stopped: Stopped) -> int:
        if stopped.code == ErrorCode.NOT_FINITE:
            where = f"unit {stopped.unit}" if stopped.unit >= 0 else "the embedding that the ends share"
            raise NotFinite(
                f"step {stopped.step}: the loss or the gradient is NaN or infinite, first seen at {where}; the swarm keeps "
                "the step before. Lower --lr or --clip, or look at the data",
                unit=stopped.unit,
            )
        return stopped.step

    def _report(self, report: StepReport) -> None:
        """Each step is reported once, whichever coordinator tells of it."""
        if not report.missing:
            if report.step < self._next_step:
                return
            self._next_step = report.step + 1
        self._on_step(report)


class _FeedingSession:
    """Working for one coordinator. `redirected`: who leads instead, if that is what it said."""

    def __init__(
        self,
        switchboard: Switchboard,
        coordinator: PeerId,
        run: Run,
        batches: Batches,
        on_report: Callable[[StepReport], None],
    ) -> None:
        self.redirected: PeerId | None = None
        self._switchboard = switchboard
        self._coordinator = coordinator
        self._run = run
        self._batches = batches
        self._on_report = on_report
        self._channel: Channel | None = None
        self._over: asyncio.Future[Stopped | None] = asyncio.get_running_loop().create_future()
        self._feeding = Tasks("trainer")

    def __repr__(self) -> str:
        return f"<Shift for {self._coordinator}>"

    async def work(self, since: int, stop: asyncio.Event) -> Stopped | None:
        """Until the coordinator says that the run is over; None where it is lost or does not lead. Raises UsageError."""
        stopping = asyncio.ensure_future(stop.wait())
        stopping.add_done_callback(lambda _: self._end(None))
        try:
            self._channel = await self._switchboard.call(self._coordinator, self._hear, lambda _error: self._end(None))
            self._channel.send(Work(encode_run(self._run), WANT, since))
            return await self._over
        except PeerRefused as error:
            if error.code == ErrorCode.WRONG_RUN:
                raise UsageError(
                    "the swarm is in the middle of a training with other settings or other data; go on with those, "
                    "or found another swarm"
                ) from None
            return None
        except SwarmnodeError as error:
            log.info("coordinator %s: %s", self._coordinator, error)
            return None
        finally:
            stopping.cancel()
            self._over.cancel()
            await self._feeding.close()
            if self._channel is not None:
                self._channel.close()

    def _end(self, result: Stopped | None) -> None:
        if not self._over.done():
            self._over.set_result(result)

    def _hear(self, _frame: Frame, body: Body) -> None:
        if isinstance(body, Lease):
            self._feeding.spawn(self._feed(body), f"lease {body.lease}")
        elif isinstance(body, StepReport):
            self._on_report(body)
        elif isinstance(body, Stopped):
            self._end(body)
        elif isinstance(body, Failed):
            self.redirected = body.peer if body.code == ErrorCode.ELSEWHERE else None
            self._end(None)
        elif isinstance(body, Error):
            if not self._over.done():
                self._over.set_exception(refusal(body.code, peer=self._coordinator))
        elif isinstance(body, End):
            self._end(None)

    async def _feed(self, lease: Lease) -> None:
        """One microbatch there and back, and word of it to the coordinator."""
        try:
            done = await self._send(lease)
            self._tell(Done(lease.lease, done.loss))
        except PeerError as error:
            code = error.code if isinstance(error, PeerRefused) else ErrorCode.PEER_LOST
            self._tell(Failed(lease.lease, error.peer or "", code))

    def _tell(self, body: Body) -> None:
        if self._channel is not None and self._channel.open:
            self._channel.send(body)

    async def _send(self, lease: Lease) -> Backward:
        """Raises PeerError where some hop is lost or cannot."""
        answer: asyncio.Future[Backward] = asyncio.get_running_loop().create_future()
        first, route = lease.route[0], lease.route

        def fail(error: Exception) -> None:
            if not answer.done():
                answer.set_exception(error)

        def hear(_frame: Frame, body: Body) -> None:
            if isinstance(body, Backward) and not answer.done():
                answer.set_result(body)
            elif isinstance(body, Fault):
                fail(refusal(body.code, peer=route[min(body.index, len(route) - 1)].peer))
            elif isinstance(body, End | Error):
                fail(refusal(ErrorCode.PEER_LOST, peer=first.peer))

        values = await asyncio.to_thread(self._batches.microbatch, lease.step, lease.number, self._run)
        infos, payload = encode_values(values)
        channel = await self._switchboard.call(first.peer, hear, fail)
        try:
            channel.send(Forward(lease.term, lease.lease, lease.step, lease.number, route, 0, infos), payload=payload)
            return await answer
        finally:
            channel.close()
