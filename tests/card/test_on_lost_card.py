"""What would lose a card its context is refused before it gets there, and a card that is lost is known at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnode.checkpoints.checkpoint_manager import _copy, _write_now
from swarmnode.compute.executor import Executor, Urgency, is_device_fault
from swarmnode.compute.graph.exporting.reader import Exported
from swarmnode.compute.graph.graph_segment import GraphSegment
from swarmnode.compute.graph.partition import partition
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.errors import ExecutorDied, NotFinite, ProtocolError
from swarmnode.swarm.records.run import Run
from swarmnode.swarm.storage.state_store import StateStore
from tests.card.conftest import LAYERS, POSITIONS
from tests.card.simulated import SimulatedCards
from tests.card.tables import SAMPLES, batch_of_tables
from tests.compute.graph.models import split


def answers(card: torch.device) -> bool:
    """Whether the card computes still."""
    return float((torch.ones(3, device=card) * 2).sum()) == 6


def loss_of(segment: GraphSegment, batch: dict[str, Tensor]) -> Tensor:
    inputs, labels = split(segment.graph, batch)
    (loss,) = segment.forward(inputs, 0, segment.units, 0, labels)
    return loss


def test_numbers_out_of_a_graphs_tables_are_the_peers_fault(card: torch.device, tables: Exported) -> None:
    graph = partition(tables.graph).graph
    segment = GraphSegment(graph, tables.weights, 0, graph.units, device=card)
    for name, wrong in itertools.product(("word", "place", "label"), (-200, 1000)):
        batch = {**batch_of_tables(), name: torch.full((SAMPLES,), wrong)}
        with pytest.raises(ProtocolError, match="cannot work with this batch"):
            loss_of(segment, batch)
    loss = loss_of(segment, batch_of_tables())
    assert answers(card) and bool(loss.isfinite())


@pytest.mark.parametrize("end", [2, LAYERS + 2])
def test_positions_beyond_the_table_are_refused_in_training(
    end: int, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    segment = load_segment(checkpoints["gpt2"], 0, end, device=card)
    ids_BT = torch.zeros((1, POSITIONS + 1), dtype=torch.int64, device=card)
    with pytest.raises(ProtocolError, match=f"{POSITIONS + 1} positions"):
        segment.forward((ids_BT,), 0, end, seed=0)
    assert answers(card)


def test_what_is_sent_at_the_edges_is_refused_or_computed(
    card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    """Of a model with a table of positions, from the first unit and from the midst of it."""
    run = Run(data=bytes(32), steps=6, batch=2, microbatch=1, sequence=POSITIONS)
    units = LAYERS + 2
    learner = Learner(load_segment(checkpoints["gpt2"], 0, units, device=card), run)
    ids_BT = torch.randint(0, 99, (1, POSITIONS), generator=torch.Generator().manual_seed(0))
    hidden_BTH = torch.randn(1, POSITIONS, 32, device=card)
    (loss,) = learner.forward(0, 0, 0, units, (ids_BT,), (ids_BT,))
    assert bool(loss.isfinite())
    ids = [ids_BT - 1000, ids_BT + 99, ids_BT.int(), ids_BT.float(), ids_BT.bool(), ids_BT[:, :1], ids_BT[:, :0]]
    (loss,) = learner.forward(99, 0, 0, units, (ids_BT,), (torch.full_like(ids_BT, -100),))
    assert float(loss) == 0.0, "no token has a label"
    labels = [*ids, ids_BT[:, 1:], ids_BT[0], torch.cat([ids_BT, ids_BT])]
    longer_BTH = torch.randn(1, POSITIONS + 1, 32, device=card)
    hidden = [longer_BTH, hidden_BTH[..., :31], hidden_BTH[0], hidden_BTH.long(), hidden_BTH * float("nan")]
    sent = [(0, one, ids_BT) for one in ids] + [(0, ids_BT, one) for one in labels]
    for lease, (start, values, told) in enumerate([*sent, *((2, one, ids_BT) for one in hidden)], 1):
        with pytest.raises((ProtocolError, NotFinite)):
            learner.forward(lease, 0, start, units, (values,), (told,))
        assert answers(card)


async def test_a_lost_card_is_known_by_whatever_error_comes_first(cards: SimulatedCards, card: torch.device) -> None:
    executor = Executor()

    def strange() -> None:
        torch.cuda.set_device(card)
        assert not is_device_fault(ValueError("of a session alone"))
        cards.lose()
        raise ValueError("something quite different")

    with pytest.raises(ExecutorDied):
        await executor.call(Urgency.FORWARD, strange, kind="try")
    assert "something quite different" in str(await executor.died)
    await executor.close()


def test_an_index_out_of_range_would_have_lost_it(cards: SimulatedCards, card: torch.device, tmp_path: Path) -> None:
    """The simulated card does what a real one does; without this no test here would say anything."""
    with pytest.raises(RuntimeError, match="device-side assert"):
        torch.nn.functional.embedding(torch.tensor([7], device=card), torch.ones(3, 2, device=card))
    with pytest.raises(RuntimeError, match="device-side assert"):
        torch.ones(3, device=card)


@pytest.mark.parametrize("save", [_copy, _write_now], ids=["copied first", "without room for a copy"])
async def test_a_card_that_is_lost_while_a_step_is_saved_leaves_no_half_of_it(
    save: Callable[[StateStore, DeviceLearners], Any],
    cards: SimulatedCards,
    card: torch.device,
    checkpoints: dict[str, Checkpoint],
    tmp_path: Path,
) -> None:
    """Neither now nor for who opens the folder later."""
    run = Run(data=bytes(32), steps=6, batch=4, microbatch=2, sequence=12)
    segment = load_segment(checkpoints["llama"], 0, LAYERS + 2, device=card)
    learner, executor = DeviceLearners([Learner(segment, run)], segment), Executor()
    store = StateStore(tmp_path, run)
    await executor.call(Urgency.CONTROL, partial(_write_now, store, learner), kind="write states")
    kept = store.steps()
    assert list(kept) == [0]
    learner.step = 1
    states = learner.state

    def lose_at_the_third(block: int) -> dict[str, Tensor]:
        if block == 2:
            cards.lose()
        return states(block)

    learner.state = lose_at_the_third  # type: ignore[method-assign]
    with pytest.raises(ExecutorDied, match="device-side assert"):
        await executor.call(Urgency.CONTROL, partial(save, store, learner), kind="save")
    assert store.steps() == kept
    store.close()
    again = StateStore(tmp_path, run)
    assert again.steps() == kept
    again.close()
    await executor.close()
