"""An engine whose p2pd does not come up again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarmnode.errors import LocalError
from swarmnode.net.libp2p.engine import MOST_FAILED_STARTS, Engine, EngineConfig
from tests.net.virtual import in_virtual_time


class DeadDaemon:
    """A p2pd that has ended."""

    age_s = 0.0

    def __init__(self) -> None:
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.exited.set_result(1)

    async def stop(self) -> None:
        """It has ended."""


class Unlucky(Engine):
    """Its p2pd dies, and every other one at its start."""

    starts = 0

    async def _start_daemon(self) -> None:
        self.starts += 1
        raise LocalError("no more processes")


@in_virtual_time
async def test_a_p2pd_that_cannot_be_started_again_ends_the_peer_with_the_reason(tmp_path: Path) -> None:
    config = EngineConfig(tmp_path / "identity")
    engine = Unlucky(config)
    engine._daemon = DeadDaemon()  # type: ignore[assignment]
    engine._tasks.spawn(engine._watch(), "watch p2pd")
    error = await asyncio.wait_for(config.supervisor.broken(), 120)
    assert "no more processes" in str(error)
    assert engine.starts == MOST_FAILED_STARTS
    await engine.close()
