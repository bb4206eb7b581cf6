"""What a listener keeps of the steps that go by is bounded and in the ledger; what is forgotten is not passed over."""

from __future__ import annotations

import pytest
import torch

from swarmnode.errors import LocalError
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.training.averaging.all_reduce import Agreed
from swarmnode.training.worker.stage_state import MAX_MISSED, MissedSteps

SIZE_BYTES = 4000


def agreed() -> Agreed:
    return Agreed(sums={(0,): torch.zeros(SIZE_BYTES // 4)})


def listening(steps: int, *, room: int | None = None) -> tuple[MissedSteps, MemoryLedger]:
    ledger = MemoryLedger(None if room is None else room * SIZE_BYTES)
    missed = MissedSteps(ledger)
    for step in range(10, 10 + steps):
        missed.store_step(step, agreed(), 1.0)
    return missed, ledger


def taken(missed: MissedSteps, step: int) -> list[int]:
    """As a listener makes up for them."""
    steps = []
    while (found := missed.pop_step(step)) is not None:
        found.memory.release()
        steps.append(found.step)
        step += 1
    return steps


def test_they_are_made_up_for_in_order_and_their_memory_comes_back() -> None:
    missed, ledger = listening(5)
    assert ledger.accounts()[Account.AVERAGING] == 5 * SIZE_BYTES
    assert taken(missed, 12) == [12, 13, 14]
    assert ledger.used_bytes == 0
    assert taken(missed, 20) == []


@pytest.mark.parametrize(("room", "kept"), [(None, MAX_MISSED), (3, 3)])
def test_they_are_few_and_the_oldest_go(room: int | None, kept: int) -> None:
    missed, ledger = listening(100, room=room)
    assert len(missed) == kept and ledger.used_bytes == kept * SIZE_BYTES
    with pytest.raises(LocalError, match="a later state"):
        missed.pop_step(10)
    assert taken(missed, 110 - kept) == list(range(110 - kept, 110))


def test_one_for_which_there_is_no_room_at_all_is_not_passed_over() -> None:
    missed, _ = listening(1, room=0)
    with pytest.raises(LocalError):
        missed.pop_step(10)
    assert taken(missed, 11) == []


def test_who_listens_anew_forgets_everything() -> None:
    missed, ledger = listening(100)
    missed.clear()
    assert ledger.used_bytes == 0 and taken(missed, 10) == []
