"""Restoration: a stage whose units nobody else holds any more brings their last state back from where it was kept.

It happens where the last holder of a unit is gone for good and this node came in its place. The coordinator then finds the step on
this disk, too, and leads everybody back to it (`plan/training/recovery.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from swarmnode.checkpoints.checkpoint_manager import CheckpointManager
from swarmnode.codec.training_messages import Condition
from swarmnode.errors import NetworkDown, PeerError, SwarmnodeError
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.host import Host
from swarmnode.plan.spans.placement import HOLDING
from swarmnode.plan.training.backups import learnt_alone
from swarmnode.swarm.records.announcement import State
from swarmnode.training.worker.stage import TrainingStage

log = logging.getLogger(__name__)

LOOK_S = 2.0


class Restoration:
    """Of one stage, as long as it has no state: in no run yet, or in one whose states nobody is there to give."""

    def __init__(self, host: Host, stage: TrainingStage, checkpoint_manager: CheckpointManager, units: int) -> None:
        segment = stage.segment
        self._host = host
        self._stage = stage
        self._checkpoint_manager = checkpoint_manager
        self._units = units
        self._blocks: Sequence[int] = sorted({*segment.parameters(), *range(segment.start, segment.end)})
        self._tasks = Tasks("restoration", on_crash=host.supervisor.ends_peer)

    def __repr__(self) -> str:
        return f"<Restoration of blocks {list(self._blocks)}>"

    def start(self) -> None:
        """Watch whether it is needed from now on."""
        self._tasks.spawn(self._watch(), "watch")

    async def close(self) -> None:
        """Needed no more."""
        await self._tasks.close()

    async def _watch(self) -> None:
        while True:
            if self._stage.state.condition != Condition.READY and self._is_needed():
                await self._bring()
            await asyncio.sleep(LOOK_S)

    def _others(self) -> list[PeerId]:
        return [peer for peer in self._host.directory.peers() if peer != self._host.peer_id]

    @property
    def is_last(self) -> bool:
        """Whether no other node has learnt some unit of this stage. To one that has none says so alone: it has averaged with it."""
        held, announced = range(self._stage.segment.start, self._stage.segment.end), self._host.directory.peers()
        met = self._stage.state.replicas if self._stage.state.condition == Condition.READY else None
        return bool(learnt_alone(announced.values(), self._host.peer_id, held, self._units, met))

    @property
    def is_gap(self) -> bool:
        """Whether some unit of the model has nobody at all, so that nothing can be trained."""
        holding = [peer for peer in self._host.directory.peers().values() if peer.life in HOLDING]
        return any(not any(peer.holds(unit) for peer in holding) for unit in range(self._units))

    def _is_needed(self) -> bool:
        """Whether something is trained already, and some unit of this stage has no holder but this one."""
        announced = self._host.directory.peers()
        ready = (announced[peer] for peer in self._others() if announced[peer].life is State.READY)
        return (self._stage.state.step > 0 or any(peer.training_step > 0 for peer in ready)) and self.is_last

    async def _bring(self) -> None:
        try:
            step = await self._checkpoint_manager.restore(self._others, self._blocks, self._units)
        except (PeerError, NetworkDown) as error:
            log.info("the state of units %s is not to be had: %s", list(self._blocks), error)
            return
        except SwarmnodeError as error:
            log.warning("%s", error)
            return
        if step is not None:
            log.warning("step %d of units %s was brought back from where it was kept", step, list(self._blocks))
            self._stage.tell_status()
