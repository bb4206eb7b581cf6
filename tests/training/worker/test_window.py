"""Leases are granted to a window: no stage is given more microbatches than it says that it has room for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.test_hangs import Scenario, in_scenario


@pytest.mark.parametrize("tight", [0, 1, 2])
def test_a_stage_with_room_for_one_is_never_busy(tmp_path: Path, tight: int) -> None:
    async def test(scene: Scenario) -> None:
        await scene.join(0, 1, 2)
        scene.swarm.volunteers[tight].ledger.limit_bytes = 1  # there is always room for one
        await scene.train()
        for volunteer in scene.swarm.volunteers:
            assert not volunteer.stage.meter.faults

    in_scenario(tmp_path, test)
