"""Work on results gives the same by its graph, and gives its memory back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from swarmnode.codec.tensors import Codec
from swarmnode.compute.executor import card_answers
from swarmnode.compute.serving.device_transfers import (
    HELD_BYTES,
    INPUT_BYTES,
    USES,
    CapturedWorks,
    DeviceOutputs,
    Encoding,
    finiteness_of_each,
)
from swarmnode.ledger import Account, MemoryLedger

SESSIONS, WIDTH = 3, 96


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def states(card: torch.device, seed: int, *, width: int = WIDTH) -> list[Tensor]:
    """Tensors (1, 1, width) of three sessions; those of the second hold NaN in every other pass."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(1, 1, width, generator=generator) for _ in range(SESSIONS)]
    if seed % 2:
        tensors[1][0, 0, 5] = float("nan")
    return [tensor.to(card) for tensor in tensors]


def test_a_replay_gives_what_the_work_gives(card: torch.device) -> None:
    works = CapturedWorks()
    for number in range(USES + 4):
        tensors = states(card, number)
        replaying, ordinary = DeviceOutputs(works), DeviceOutputs()
        told = []
        for outputs in (replaying, ordinary):
            encoded = [outputs.add_encoded(tensor, Codec.INT8) for tensor in tensors]
            checks = [outputs.add_finiteness(tensor) for tensor in tensors]
            fetched = outputs.fetch()
            told.append(
                ([payload(fetched).numpy().tobytes() for _, payload in encoded], [check(fetched) for check in checks])
            )
        assert told[0] == told[1]
        assert told[0][1] == [True, number % 2 == 0, True]
    assert len(works) == 2 and not works.refusal


def test_graphs_are_in_the_ledger_until_they_are_dropped(card: torch.device) -> None:
    ledger = MemoryLedger()
    works = CapturedWorks(ledger)
    for width in range(64, 64 + 40):
        for _ in range(USES):
            works.run(finiteness_of_each, states(card, 0, width=width))
    assert HELD_BYTES / 2 < ledger.accounts()[Account.ACTIVATIONS] <= HELD_BYTES and 0 < len(works) < 40
    works.clear()
    assert ledger.accounts()[Account.ACTIVATIONS] == 0 and len(works) == 0


def test_what_is_large_or_finds_no_memory_is_computed_all_the_same(card: torch.device) -> None:
    works, small = CapturedWorks(), CapturedWorks(MemoryLedger(1000))
    for _ in range(2 * USES):
        wide = states(card, 0, width=INPUT_BYTES)
        assert works.run(finiteness_of_each, wide)[0].tolist() == [True] * SESSIONS
        assert small.run(finiteness_of_each, states(card, 1))[0].tolist() == [True, False, True]
    assert len(works) == len(small) == 0 and not small.refusal


def test_work_that_waits_is_not_captured(cards: object, card: torch.device) -> None:
    def waits(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("operation not permitted when stream is capturing")
        return (torch.stack(list(tensors)).sum(dim=1),)

    works = CapturedWorks()
    for _ in range(2 * USES):
        assert works.run(waits, states(card, 0))[0].shape[0] == SESSIONS
        assert works.run(Encoding(Codec.NONE), states(card, 0))[0].shape == (SESSIONS, 4 * WIDTH)
    assert "not permitted" in works.refusal and len(works) == 0 and card_answers()
