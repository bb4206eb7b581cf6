"""Passes of tuning give way to sessions."""

from __future__ import annotations

from swarmnode.compute.executor import Urgency
from swarmnode.compute.training.adapters.adapter_trainer import ByPiece
from swarmnode.tuning.adapter_parts import TuningPace
from tests.compute.inline_executor import InlineExecutor
from tests.net.virtual import in_virtual_time

PIECES = 6


@in_virtual_time
async def test_a_pass_stops_after_its_piece_once_a_session_comes() -> None:
    sessions, items, done = [False], [], 0
    executor = InlineExecutor(lambda item: items.append(item) or 0.1)  # type: ignore[func-returns-value]

    def work() -> ByPiece[str]:
        nonlocal done
        for piece in range(PIECES):
            sessions[0] = piece >= 2
            done += 1
            yield
        return "done"

    pace = TuningPace(executor, 0.25, lambda: sessions[0])
    began_s = executor.clock()
    assert await pace.run(Urgency.FORWARD, work(), kind="tune", owner="owner", size=0) == "done"
    assert done == PIECES and len(items) == 1 + (PIECES - 2), "three pieces at once, then one by one"
    share = 0.1 * len(items) / (executor.clock() - began_s)
    assert share < 0.35, "and the device rests in between"
    await executor.close()
