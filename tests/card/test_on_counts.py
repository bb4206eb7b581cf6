"""What `python -m tests.card.counts` prints is counted in every check, and is no more than it may be."""

from __future__ import annotations

from swarmnode.compute.model.checkpoint import Checkpoint
from tests.card.counts import rows
from tests.card.simulated import SimulatedCards


def test_every_row_is_within_its_floor(cards: SimulatedCards, checkpoints: dict[str, Checkpoint]) -> None:
    counted = list(rows(cards, checkpoints["llama"]))
    assert len(counted) == len({row.what for row in counted}) == 13
    for row in counted:
        assert all(0 < number <= most for number, most in zip(row.counted, row.floor, strict=True)), row
        assert str(row).count("|") == 4
