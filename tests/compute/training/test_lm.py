"""Language models in pieces, against transformers and torch alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarmnode.codec.body import SHARED
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.lm import load_segment
from swarmnode.errors import ProtocolError
from swarmnode.swarm.records.run import Run
from tests.compute.training.conftest import (
    MICROBATCHES,
    VOCABULARY,
    build,
    ids_of,
    learners,
    make_run,
    pass_through,
    shared_sum,
    train,
)

STEPS = 10
WHOLE, THREE = (0, 5), (0, 2, 4, 5)
Get = Callable[[str], Checkpoint]


def plain_losses(kind: str, run: Run) -> list[float]:
    """A usual loop with transformers' own loss, torch's AdamW and clip_grad_norm_."""
    model = build(kind).train()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": run.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=run.learning_rate, betas=run.betas, eps=run.epsilon)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for index in range(MICROBATCHES):
            ids_BT = ids_of(step, index)
            loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
            (loss / MICROBATCHES).backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rate_at(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / MICROBATCHES)
    return losses


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_whole_and_split_draw_the_curve_of_a_plain_loop(kind: str, checkpoint: Get) -> None:
    run = make_run()
    expected = plain_losses(kind, run)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3)
    for cuts in (WHOLE, THREE):
        assert train(learners(checkpoint(kind), run, cuts), STEPS) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_is_the_same_in_any_split(checkpoint: Get, recompute: bool) -> None:
    run = make_run()
    expected = train(learners(checkpoint("gpt2-dropout"), run, WHOLE), 4)
    without = train(learners(checkpoint("gpt2"), run, WHOLE), 1)
    assert expected[0] != pytest.approx(without[0], rel=1e-4)
    for cuts in (THREE, (0, 1, 2, 3, 4, 5)):
        chain = learners(checkpoint("gpt2-dropout"), run, cuts, recompute=recompute)
        torch.rand(5)  # whoever else draws does not matter
        assert train(chain, 4) == pytest.approx(expected, rel=1e-5)


def test_the_seed_of_the_run_decides_what_drops_out(checkpoint: Get) -> None:
    first, second = (train(learners(checkpoint("gpt2-dropout"), make_run(seed=seed), WHOLE), 1)[0] for seed in (1, 2))
    assert first != second


def test_blocks_are_the_same_in_any_split(checkpoint: Get) -> None:
    for kind in ("gpt2", "llama"):
        whole = {block: set(named) for block, named in load_segment(checkpoint(kind), 0, 5).parameters().items()}
        parts: dict[int, set[str]] = {}
        for start, end in ((0, 1), (1, 4), (4, 5)):
            for block, named in load_segment(checkpoint(kind), start, end).parameters().items():
                assert parts.setdefault(block, set(named)) == set(named)
        assert parts == whole
        assert (SHARED in whole) == (kind == "gpt2")
        assert {name for names in whole.values() for name in names} == {n for n, _ in build(kind).named_parameters()}


def test_the_tied_gradient_is_the_sum_of_both_roles(checkpoint: Get) -> None:
    (whole,) = learners(checkpoint("gpt2"), make_run(), WHOLE)
    split = learners(checkpoint("gpt2"), make_run(), THREE)
    pass_through([whole], 0)
    pass_through(split, 0)
    assert [SHARED in learner.blocks for learner in split] == [True, False, True]
    first, last = (split[place].gradient([SHARED]).copy() for place in (0, 2))
    assert first.norm() > 0 and last.norm() > 0
    torch.testing.assert_close(shared_sum(split), whole.gradient([SHARED]).copy(), rtol=1e-5, atol=1e-7)


def test_weights_are_memory_of_their_own(checkpoint: Get) -> None:
    source = checkpoint("llama")
    before = {file.name: file.read_bytes() for file in source.path.iterdir()}
    (learner,) = learners(source, make_run(), WHOLE)
    train([learner], 1)
    assert {file.name: file.read_bytes() for file in source.path.iterdir()} == before
    assert all(
        parameter.requires_grad for named in learner.segment.parameters().values() for parameter in named.values()
    )


def test_values_that_do_not_fit_are_refused(checkpoint: Get) -> None:
    segment = load_segment(checkpoint("gpt2"), 0, 5)
    ids_BT = ids_of(0, 0)
    for values, start, text in [
        ((ids_BT + VOCABULARY,), 0, "vocabulary has 99: the data was made with another tokenizer"),
        ((-1 - ids_BT,), 0, "vocabulary"),
        ((ids_BT.float(),), 0, "float32"),
        ((ids_BT[:, :1],), 0, "shape"),
        ((ids_BT,), 1, "hidden states"),
        ((torch.zeros(2, 12, 32), ids_BT, ids_BT), 1, "3 values at boundary 1"),
        ((torch.zeros(2, 12, 31),), 1, "hidden states"),
    ]:
        with pytest.raises(ProtocolError, match=text):
            segment.forward(values, start, 5, 0, (ids_BT,))
    for labels, text in [
        ((), "the labels have the shape None"),
        ((ids_BT[:1],), r"the labels have the shape \(1, 12\), but the microbatch has \(2, 12\)"),
        ((ids_BT + VOCABULARY,), "vocabulary"),
        ((ids_BT.float(),), "float32"),
    ]:
        with pytest.raises(ProtocolError, match=text):
            segment.forward((torch.zeros(2, 12, 32),), 4, 5, 0, labels)


@pytest.mark.parametrize(("stored", "is_let_go"), [(torch.float32, True), (torch.bfloat16, False)])
def test_what_was_mapped_from_the_file_is_let_go(
    stored: torch.dtype, is_let_go: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what was made of another dtype, which goes by itself: a machine with swap would write it there."""
    gone: list[Tensor] = []
    monkeypatch.setattr("swarmnode.compute.training.lm.release_pages", gone.append)
    build("gpt2").to(stored).save_pretrained(tmp_path)
    segment = load_segment(Checkpoint(tmp_path), 0, 5)
    kept = {parameter.data_ptr() for named in segment.parameters().values() for parameter in named.values()}
    assert len(gone) == (len(kept) if is_let_go else 0)
    assert kept.isdisjoint(weight.data_ptr() for weight in gone), "only copies are trained"


def test_repr(checkpoint: Get) -> None:
    assert repr(load_segment(checkpoint("llama"), 1, 3)) == "SpanSegment([1:3) of 5 units on cpu)"
