"""Trainer: feeds a run's microbatches to the swarm and hears how each step went. Any number share the work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, End, Error, Fault
from swarmnode.codec.training_messages import Backward, Done, Failed, Forward, Lease, StepReport, Stopped, Work
from swarmnode.compute.training.batches import Batches
from swarmnode.errors import ErrorCode, NotFinite, PeerError, PeerRefused, SwarmnodeError, UsageError, refusal
from swarmnode.net.interfaces import PeerId
from swarmnode.net.switchboard import Channel, Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.roles.training.values import encode_values
from swarmnode.swarm.run import Run, encode_run

log = logging.getLogger(__name__)

WANT = 32
RETRY_S = 0.3


class Trainer:
    """`conductors` yields the peers that may conduct, the likeliest first. `train` returns when all steps are done."""

    def __init__(
        self,
        switchboard: Switchboard,
        conductors: Callable[[], list[PeerId]],
        run: Run,
        batches: Batches,
        on_step: Callable[[StepReport], None],
    ) -> None:
        self._switchboard = switchboard
        self._conductors = conductors
        self._run = run
        self._batches = batches
        self._on_step = on_step
        self._next_step = 0
        self._tasks = Tasks("trainer")

    def __repr__(self) -> str:
        return f"<Trainer at step {self._next_step} of {self._run.steps}>"

    async def train(self, stop: asyncio.Event) -> int:
        """Feed until the run is over or `stop` is set; the steps done. Raises UsageError where the swarm is in another run,
        NotFinite where the loss is."""
        while not stop.is_set():
            for peer in self._conductors():
                stopped = await self._serve(peer, stop)
                if stopped is not None:
                    return self._finish(stopped)
            await asyncio.sleep(RETRY_S)
        return self._next_step

    def _finish(self, stopped: Stopped) -> int:
        if stopped.code == ErrorCode.NOT_FINITE:
            raise NotFinite(
                f"step {stopped.step}: the loss or a gradient is not finite; the swarm keeps the step before",
                unit=stopped.unit,
            )
        return stopped.step

    async def _serve(self, peer: PeerId, stop: asyncio.Event) -> Stopped | None:
        """Work for one conductor until it is lost or says that the run is over."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[Stopped | None] = loop.create_future()
        leases: dict[int, asyncio.Task[None]] = {}

        def hear(_frame: Frame, body: Body) -> None:
            if isinstance(body, Lease):
                leases[body.lease] = self._tasks.spawn(self._feed(channel, body), f"lease {body.lease}")
                leases[body.lease].add_done_callback(lambda _task: leases.pop(body.lease, None))
            elif isinstance(body, StepReport):
                self._report(body)
            elif not over.done() and isinstance(body, Stopped):
                over.set_result(body)
            elif not over.done() and isinstance(body, Error):
                over.set_exception(refusal(body.code, peer=peer))
            elif not over.done() and isinstance(body, End):
                over.set_result(None)

        def lost(_error: PeerError) -> None:
            if not over.done():
                over.set_result(None)

        try:
            channel = await self._switchboard.call(peer, hear, lost)
            channel.send(Work(encode_run(self._run), WANT, self._next_step))
            stopping = asyncio.ensure_future(stop.wait())
            either: set[asyncio.Future[Any]] = {over, stopping}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            channel.close()
            return over.result() if over.done() else None
        except PeerRefused as error:
            if error.code == ErrorCode.WRONG_RUN:
                raise UsageError("the swarm is being trained with other settings or other data") from None
            return None
        except SwarmnodeError as error:
            log.info("conductor %s: %s", peer, error)
            return None
        finally:
            for task in list(leases.values()):
                task.cancel()
            over.cancel()

    def _report(self, report: StepReport) -> None:
        if not report.missing:
            if report.step < self._next_step:
                return
            self._next_step = report.step + 1
        self._on_step(report)

    async def _feed(self, conductor: Channel, lease: Lease) -> None:
        """One microbatch there and back."""
        answer: asyncio.Future[Backward] = asyncio.get_running_loop().create_future()
        route = lease.route

        def fail(error: Exception) -> None:
            if not answer.done():
                answer.set_exception(error)

        def hear(_frame: Frame, body: Body) -> None:
            if isinstance(body, Backward) and not answer.done():
                answer.set_result(body)
            elif isinstance(body, Fault):
                fail(refusal(body.code, peer=route[min(body.index, len(route) - 1)].peer))
            elif isinstance(body, End | Error):
                fail(refusal(ErrorCode.PEER_LOST, peer=route[0].peer))

        try:
            values = await asyncio.to_thread(self._batches.microbatch, lease.step, lease.number, self._run)
            infos, payload = encode_values(values)
            channel = await self._switchboard.call(route[0].peer, hear, fail)
            try:
                channel.send(
                    Forward(lease.term, lease.lease, lease.step, lease.number, route, 0, infos), payload=payload
                )
                done = await answer
            finally:
                channel.close()
            if conductor.open:
                conductor.send(Done(lease.lease, done.loss))
        except PeerError as error:
            if conductor.open:
                code = error.code if isinstance(error, PeerRefused) else ErrorCode.PEER_LOST
                conductor.send(Failed(lease.lease, error.peer or "", code))

    async def close(self) -> None:
        """Stop feeding."""
        await self._tasks.close()
