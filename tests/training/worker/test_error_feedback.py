"""What top-k leaves out comes with the next values, takes no memory that is not there, and NaN does not stay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode_values, payload_of
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.measuring.meters import FORWARD
from swarmnode.plan.compression import Choice
from swarmnode.training.worker.activation_compressor import MAX_LINKS, ErrorFeedback

LINK = ("bob", FORWARD)
FEW = Choice(Codec.TOPK, "", 0.1)
IDS = torch.ones(4, 8, dtype=torch.int64)


def sent(feedback: ErrorFeedback, values: Sequence[Tensor], choice: Choice = FEW) -> tuple[Tensor, ...]:
    infos, payloads = feedback.encode(values, LINK, choice)
    return decode_values(infos, payload_of(payloads), "cpu")


def test_everything_is_sent_in_the_end() -> None:
    feedback = ErrorFeedback(MemoryLedger())
    value = torch.randn(40, 10, generator=torch.Generator().manual_seed(0))
    total = sum((sent(feedback, (value, IDS))[0] for _ in range(100)), torch.zeros_like(value))
    assert torch.allclose(total / 100, value, atol=0.2), "less than the largest that waits, over 100"
    assert not torch.allclose(sent(ErrorFeedback(MemoryLedger()), (value, IDS))[0], value, atol=0.2)


def test_whole_numbers_stay_what_they_are() -> None:
    feedback = ErrorFeedback(MemoryLedger())
    for _ in range(3):
        assert torch.equal(sent(feedback, (torch.randn(40, 10), IDS))[1], IDS)


def test_a_link_that_is_fast_again_gets_all_that_was_left_out() -> None:
    feedback, value = ErrorFeedback(MemoryLedger()), torch.randn(40, 10)
    first = sent(feedback, (value,))[0]
    second = sent(feedback, (value,), Choice(Codec.NONE, ""))[0]
    assert torch.allclose(first + second, 2 * value, atol=1e-6)
    assert torch.equal(sent(feedback, (value,), Choice(Codec.NONE, ""))[0], value)


def test_other_shapes_begin_anew() -> None:
    feedback, other = ErrorFeedback(MemoryLedger()), torch.randn(5, 8)
    sent(feedback, (torch.randn(40, 10),))
    assert torch.equal(sent(feedback, (other,), Choice(Codec.NONE, ""))[0], other)


def test_what_is_not_finite_does_not_stay() -> None:
    feedback, value = ErrorFeedback(MemoryLedger()), torch.randn(40, 10)
    assert not sent(feedback, (torch.full((40, 10), torch.nan),))[0].isfinite().all()
    assert sent(feedback, (value,))[0].isfinite().all()


def test_memory_is_in_the_ledger_and_bounded() -> None:
    ledger = MemoryLedger(8 * 4000)
    feedback, value = ErrorFeedback(ledger), torch.randn(1000)
    for number in range(2 * MAX_LINKS):
        feedback.encode((value,), (f"peer {number}", FORWARD), FEW)
    assert ledger.used_bytes <= 8 * 4000
    assert ledger.accounts()[Account.ACTIVATIONS] == ledger.used_bytes > 0
    feedback.clear()
    assert ledger.used_bytes == 0


def test_false_values_that_went_through_do_not_outlast_their_microbatch() -> None:
    feedback, value = ErrorFeedback(MemoryLedger()), torch.randn(40, 10)
    sent(feedback, (value * 2.0**30,))
    assert sent(feedback, (value,), Choice(Codec.NONE, ""))[0].abs().max() < 10
    sent(feedback, (value * 2.0**31 / value.abs().max(),))
    assert sent(feedback, (value * 2.0**31 / value.abs().max(),))[0].abs().max() <= 2.0**32
