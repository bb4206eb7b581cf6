"""Restoration: it fetches the last state of a stage's layers from disks if no other node holds them any more.

It runs after the last holder of a layer was lost for good and this node took its place. The coordinator then finds the step
on this disk and leads all stages back to it (`plan/training/recovery.py`).
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
    """Restoration of one stage, while it has no state: it is in no run yet, or in one without a peer that could send the state."""

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
        """Start to watch whether a restoration is needed."""
        self._tasks.spawn(self._watch(), "watch")

    async def close(self) -> None:
        """Stop watching for layers whose states must be restored."""
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
        """Whether some layer of this stage has been learnt by no other node. Once the stage is ready, only peers that have
        averaged with it count."""
        held, announced = range(self._stage.segment.start, self._stage.segment.end), self._host.directory.peers()
        met = self._stage.state.replicas if self._stage.state.condition == Condition.READY else None
        return bool(learnt_alone(announced.values(), self._host.peer_id, held, self._units, met))

    @property
    def is_gap(self) -> bool:
        """Whether some layer of the model has no holder, so that training stands still."""
        holding = [peer for peer in self._host.directory.peers().values() if peer.life in HOLDING]
        return any(not any(peer.holds(unit) for peer in holding) for unit in range(self._units))

    def _is_needed(self) -> bool:
        """Return whether the swarm has trained already and only this node holds some layer of the stage."""
        announced = self._host.directory.peers()
        ready = (announced[peer] for peer in self._others() if announced[peer].life is State.READY)
        return (self._stage.state.step > 0 or any(peer.training_step > 0 for peer in ready)) and self.is_last

    async def _bring(self) -> None:
        try:
            step = await self._checkpoint_manager.restore(self._others, self._blocks, self._units)
        except (PeerError, NetworkDown) as error:
            log.info("your node cannot fetch the state of layers %s: %s", list(self._blocks), error)
            return
        except SwarmnodeError as error:
            log.warning("%s", error)
            return
        if step is not None:
            log.warning("your node has restored step %d of layers %s from stored states", step, list(self._blocks))
            self._stage.tell_status()
