"""Tuning stage: a serving stage whose layers also tune adapters of other peers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from swarmnode.ledger import MemoryLedger
from swarmnode.measuring.hardware import Workplace
from swarmnode.metrics.metric import Readings
from swarmnode.serving.serving_stage import ServingStage
from swarmnode.serving.span_part import KeptSpan
from swarmnode.serving.stage import Stage
from swarmnode.swarm.records.announcement import Section, TuningOffer
from swarmnode.swarm.records.manifest import PRIVATE, SERVING_CODECS, Manifest
from swarmnode.tuning.adapter_parts import TuningDevice, TuningPace
from swarmnode.tuning.server import TuningServer

PRIVATE_SHARE = 0.3  # where members know one another


def tune_share(asked: float | None, manifest: Manifest | None) -> float:
    """Return the share of a device's time for tuning: `asked` by the node's owner, else `PRIVATE_SHARE` in a private swarm."""
    if asked is not None:
        return asked
    return PRIVATE_SHARE if manifest is not None and manifest.membership == PRIVATE else 0.0


@dataclass(eq=False)
class TuningStage(Stage):
    """Serving stage with a tuning server beside it. Made by `beside`, ended by `close`."""

    serving: ServingStage
    tuning: TuningServer
    share: float

    def __repr__(self) -> str:
        return f"<TuningStage {self.tuning!r} beside {self.serving!r}>"

    @classmethod
    async def beside(cls, place: Workplace, serving: ServingStage, share: float) -> TuningStage:
        """Open the layers of `serving` to adapters of other peers, which take `share` of the time while sessions run."""
        manifest = place.host.swarm.manifest

        def serves() -> bool:
            return serving.server.load > 0

        devices = [
            TuningDevice(
                part.span,
                place.executors[part.device],
                TuningPace(place.executors[part.device], share, serves),
            )
            for part in serving.replicas[0]
        ]
        allowed = frozenset(SERVING_CODECS if manifest is None else manifest.codecs)
        server = TuningServer(place.host, devices, place.hardware.config.server, allowed)
        serving.server.share_memory(server.give_way)
        await server.start()
        return cls(serving, server, share)

    @property
    def bound(self) -> bool:
        """Whether these layers hold data that no other node has."""
        return self.serving.bound

    async def settled(self) -> None:
        """Wait until leaving would not lose work that is under way."""
        await self.serving.settled()

    def rest_s(self) -> float:
        """Return the seconds until the stage is of no more use."""
        return self.serving.rest_s()

    def sections(self) -> tuple[Section, ...]:
        """Return the serving stage's sections of the announcement, and the share for tuning."""
        percent = 0 if self.tuning.draining else max(1, round(100 * self.share))
        return (*self.serving.sections(), TuningOffer(tune_percent=percent))

    def readings(self) -> Readings:
        """Yield the metrics of sessions and of adapters."""
        yield from self.serving.readings()
        yield from self.tuning.readings()

    async def finish(self) -> None:
        """Take no new work, and wait until all sessions have ended and all adapters have moved."""
        await asyncio.gather(self.serving.finish(), self.tuning.finish())

    def take_on(self) -> None:
        """Accept new work again."""
        self.serving.take_on()
        self.tuning.take_on()

    async def drain(self, timeout_s: float) -> None:
        """Take no new work, and let the present one move to other peers."""
        await asyncio.gather(self.serving.drain(timeout_s), self.tuning.drain(timeout_s))

    async def close(self, *, keep_span: bool = False) -> None:
        """End all work, and free all memory. The weights stay if `keep_span` is true."""
        await self.tuning.close()
        await self.serving.close(keep_span=keep_span)

    def keep(self, host: MemoryLedger) -> KeptSpan | None:
        """Move the weights of a closed stage into host memory; None if they cannot be kept."""
        return self.serving.keep(host)
