"""TrainingMemory: what training takes is in the ledger, and microbatches wait where there is no room."""

from __future__ import annotations

import msgspec
import pytest

from swarmnode.compute.graph.costs.estimate import UnitEstimate
from swarmnode.compute.graph.costs.rates import ComputeWork
from swarmnode.compute.training import optimizer
from swarmnode.compute.training.learner import Learner
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.swarm.records.run import Run
from swarmnode.training.worker.memory import MAX_IN_FLIGHT, SMALL_PAYLOADS_BYTES, TrainingMemory, segment_bytes
from tests.compute.training.toy import ToySegment
from tests.peer.training_swarm import toy_batches, toy_run

RUN = toy_run(toy_batches(), 3)
KEPT, ENTERS = 1000, 10  # bytes by unit and microbatch


def estimates(_run: Run) -> list[UnitEstimate]:
    return [UnitEstimate(ComputeWork(), ComputeWork(), KEPT, 0, ENTERS)] * ToySegment.units


def test_everything_is_counted_and_comes_back() -> None:
    ledger, segment = MemoryLedger(), ToySegment(0, 2)
    memory = TrainingMemory(ledger, segment, estimates)
    assert not memory.begin(RUN)
    learner = Learner(segment, RUN)
    memory.hold(learner)
    accounts = ledger.accounts()
    assert accounts[Account.WEIGHTS] == segment_bytes(segment)
    assert accounts[Account.MESSAGES] == SMALL_PAYLOADS_BYTES
    assert accounts[Account.GRADIENTS] == learner.gradient_bytes > 0
    assert accounts[Account.OPTIMIZER] == learner.optimizer_bytes > learner.gradient_bytes
    assert accounts[Account.ACTIVATIONS] == 2 * KEPT + KEPT  # a microbatch, and the pass that runs
    assert accounts[Account.AVERAGING] == 0
    memory.average(RUN, memory.gradient_bytes)
    assert ledger.accounts()[Account.AVERAGING] == 2 * learner.gradient_bytes
    memory.close()
    assert ledger.used_bytes == 0


def test_microbatches_are_let_in_while_there_is_room() -> None:
    ledger, segment = MemoryLedger(), ToySegment(0, 2)
    memory = TrainingMemory(ledger, segment, estimates)
    memory.begin(RUN)
    ledger.limit_bytes = ledger.used_bytes + 2 * KEPT  # for one more
    assert [memory.admit(place) for place in range(4)] == [True, True, False, False]
    assert memory.admit(1), "it was let in before"
    memory.ended(1)
    memory.ended(1)
    assert memory.admit(2)
    assert ledger.used_bytes <= ledger.limit_bytes


def test_the_window_is_what_is_let_in() -> None:
    ledger, segment = MemoryLedger(), ToySegment(0, 2)
    memory = TrainingMemory(ledger, segment, estimates)
    assert memory.window == 0, "nothing is known"
    memory.begin(RUN)
    assert memory.window == MAX_IN_FLIGHT
    ledger.limit_bytes = ledger.used_bytes + 5 * KEPT  # two more, and a half
    assert memory.window == 3
    assert [memory.admit(place) for place in range(4)] == [True, True, True, False]
    assert memory.window == 3
    ledger.limit_bytes = 1
    assert memory.window == 3, "what is here has its room"


def test_one_microbatch_is_let_in_however_full_it_is() -> None:
    ledger, segment = MemoryLedger(), ToySegment(0, 2)
    memory = TrainingMemory(ledger, segment, estimates)
    memory.begin(RUN)
    ledger.count(Account.MESSAGES, 10**9)
    ledger.limit_bytes = 10**9
    assert memory.admit(1)
    assert not memory.admit(2)
    memory.ended(1)
    assert memory.admit(2)


def test_a_mask_of_documents_is_kept_once_and_made_once_more() -> None:
    segment, ledger = ToySegment(0, 2), MemoryLedger()
    segment.mask_bytes = lambda _run: 300  # type: ignore[method-assign]
    assert not TrainingMemory(ledger, segment, estimates).begin(RUN)
    assert ledger.accounts()[Account.ACTIVATIONS] == 2 * KEPT + 300 + KEPT + 300


@pytest.mark.parametrize(("microbatches", "recompute"), [(4, False), (3, True)])
def test_graphs_are_computed_again_where_four_do_not_fit(microbatches: int, recompute: bool) -> None:
    segment = ToySegment(0, 2)
    room = SMALL_PAYLOADS_BYTES + 4 * segment_bytes(segment) + microbatches * 2 * KEPT  # AdamW
    memory = TrainingMemory(MemoryLedger(room), segment, estimates)
    assert memory.begin(RUN) is recompute


def test_moments_of_8_bits_leave_room_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "MIN_ELEMENTS", 1)  # of small models, too
    segment = ToySegment(0, 2)
    room = SMALL_PAYLOADS_BYTES + 2.6 * segment_bytes(segment) + 4 * 2 * KEPT
    recomputes = [
        TrainingMemory(MemoryLedger(int(room)), segment, estimates).begin(msgspec.structs.replace(RUN, optimizer=name))
        for name in ("adamw", "adamw8bit")
    ]
    assert recomputes == [True, False]


def test_where_nothing_is_known_graphs_are_kept() -> None:
    ledger = MemoryLedger(10)
    memory = TrainingMemory(ledger, ToySegment(0, 2))
    assert not memory.begin(RUN)
    assert memory.admit(1) and memory.admit(2)
