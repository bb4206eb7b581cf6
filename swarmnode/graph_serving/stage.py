"""Inference stage: a span of a graph's layers, loaded, measured, and open to other peers' passes."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial

import torch

from swarmnode.compute.capacity.speed import Speeds
from swarmnode.compute.executor import Urgency
from swarmnode.compute.graph.operators import torch_constant
from swarmnode.compute.graph.segment import GraphSegment, load_segment
from swarmnode.compute.graph.serialise import GraphCheckpoint
from swarmnode.compute.stopwatch import Clock, best_s
from swarmnode.graph_serving.server import InferenceServer
from swarmnode.ledger import Account, Reservation
from swarmnode.measuring.capability import Capability
from swarmnode.measuring.hardware import Hardware, Workplace
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.plan.view import Span
from swarmnode.serving.stage import Stage
from swarmnode.swarm.records.sections import Section, ServingLoad


@dataclass(eq=False)
class InferenceStage(Stage):
    """Stage that serves a graph's layers to other peers. Made by `load`, ended by `close`."""

    hardware: Hardware
    server: InferenceServer
    capability: Capability
    weights: Reservation
    label: str

    def __repr__(self) -> str:
        return f"<InferenceStage {self.server!r}>"

    @classmethod
    async def load(cls, place: Workplace, checkpoint: GraphCheckpoint, units: Span) -> InferenceStage:
        """Load `units`, whose weights are on this machine, measure them, and start to serve.

        Raises CheckpointError, LocalError.
        """
        host, hardware = place.host, place.hardware
        (lent,), (executor,) = hardware.lent, place.executors
        async with contextlib.AsyncExitStack() as undo:
            weights = lent.ledger.count(Account.WEIGHTS, hardware.sizes.need_bytes(units.start, units.end, 0))
            undo.callback(weights.release)
            segment = await asyncio.to_thread(
                load_segment, checkpoint.path, units.start, units.end, device=lent.device.torch_device
            )
            once = partial(measure, segment, host.clock.compute)
            capability = await executor.call(
                Urgency.CONTROL,
                lambda: place.measure(units.units, lent, once),
                kind="measure",
                owner=f"units {units}",
            )
            server = InferenceServer(host, segment, executor, lent)
            undo.push_async_callback(server.close)
            await server.start()
            undo.pop_all()
        return cls(hardware, server, capability, weights, f"{units.start}:{units.end}")

    def sections(self) -> tuple[Section, ...]:
        """Return the announcement's sections on this stage: hardware, measured capability and load."""
        return self.hardware.section, self.capability.section(), ServingLoad(sessions=self.server.load)

    def readings(self) -> Readings:
        """Yield the metrics of this stage."""
        yield Reading(table.SPEED, self.capability.speeds.decode_units_per_s, (self.label,))
        yield from self.server.readings()

    async def drain(self, timeout_s: float) -> None:
        """Take no new passes, and wait for the running ones for up to `timeout_s` seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.server.finish(), timeout_s)

    async def finish(self) -> None:
        """Take no new passes, and wait until the last one is over."""
        await self.server.finish()

    def take_on(self) -> None:
        """Accept passes again after `finish` has stopped them."""
        self.server.draining = False

    async def close(self, *, keep_span: bool = False) -> None:
        """End all passes and release the memory."""
        await self.server.close()
        self.weights.release()


def measure(segment: GraphSegment, clock: Clock) -> Speeds:
    """Measure passes of the batch size that the module was exported with. Each sample counts as one position."""
    batch = segment.graph.batch
    values = tuple(
        torch.zeros(value.type.sizes(batch), dtype=torch_constant(value.type.dtype), device=segment.device)
        for value in segment.layout.boundaries[segment.start]
    )
    with torch.inference_mode():
        pass_s = best_s(lambda: segment.forward(values, segment.start, segment.end, 0), segment.device, clock)
    speed = (segment.end - segment.start) * batch / pass_s
    return Speeds(decode_units_per_s=speed, prefill_units_per_s=speed)
