"""Rows of several documents train as each document alone does, whole and in pieces; other models refuse them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.datasets import batches
from swarmnode.compute.training.datasets.batches import SampleBatches, WithHeldOut
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import PACKING_FAMILIES, can_pack, load_segment
from swarmnode.data.rows import NO_LABEL, make_rows
from swarmnode.data.samples import TokenSample
from swarmnode.errors import ProtocolError, UsageError
from swarmnode.swarm.records.run import Run
from tests.compute.training.conftest import commit_all

VOCABULARY, LENGTH, UNITS = 64, 16, 4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DROPOUTS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attention_dropout": 0.0}


def save(folder: Path, family: str, **changes: Any) -> Checkpoint:
    if not folder.exists():
        experts = EXPERTS if family in ("qwen3_moe", "mixtral") else {}
        config = AutoConfig.for_model(family, **{**SIZES, **experts, **DROPOUTS, **changes})
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return Checkpoint(folder)


def documents(count: int = 7, longest: int = 9) -> list[TokenSample]:
    chance = np.random.default_rng(0)
    lengths = chance.integers(3, longest, count)
    ids = [chance.integers(0, VOCABULARY, length).tolist() for length in lengths]
    return [TokenSample(one, [place > len(one) // 2 for place in range(len(one))]) for one in ids]


def run_of(batches: SampleBatches, batch: int, **changes: Any) -> Run:
    settings: dict[str, Any] = {"steps": 4, "microbatch": 1, "sequence": LENGTH, "label_weights": True, "clip": 0.0}
    return Run(data=batches.fingerprint, batch=batch, **{**settings, **changes})


def step(checkpoint: Checkpoint, cuts: tuple[int, ...], pack: bool) -> tuple[float, list[Tensor]]:
    """The loss and the gradients of one step over all samples."""
    batches = SampleBatches(make_rows(documents(), LENGTH, pack=pack), VOCABULARY)
    count = batches.samples(run_of(batches, 1))
    run = run_of(batches, count)
    chain = [Learner(load_segment(checkpoint, start, end), run) for start, end in pairwise(cuts)]
    total = 0.0
    for number in range(run.microbatches):
        values, labels = batches.microbatch(0, number, run)
        for learner in chain:
            values = learner.forward(
                number,
                number,
                learner.segment.start,
                learner.segment.end,
                values,
                labels if learner is chain[-1] else (),
            )
        grads: tuple[Tensor | None, ...] = ()
        for learner in reversed(chain):
            grads = learner.backward(number, grads)
        total += float(values[0])
    gradients = [learner.block(block).sums_N.clone() for learner in chain for block in learner.blocks if block >= 0]
    commit_all(chain)
    return total / run.microbatches, gradients


@pytest.mark.parametrize("family", sorted(PACKING_FAMILIES))
def test_packed_rows_train_as_separate_documents(family: str, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / family, family)
    loss, gradients = step(checkpoint, (0, UNITS), pack=False)
    cuts = (0, 2, UNITS) if family in ("llama", "gpt2") else (0, UNITS)
    packed_loss, packed_gradients = step(checkpoint, cuts, pack=True)
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    for one, other in zip(gradients, packed_gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_several_documents_share_a_row() -> None:
    rows = make_rows(documents(), LENGTH, pack=True)
    assert len(rows.ids_NT) < 7 and (rows.positions_NT[:, 1:] == 0).any()
    assert rows.samples == 7 and rows.tokens == sum(len(one.tokens) for one in documents())


@pytest.mark.parametrize("pack", [True, False])
def test_the_tokens_of_a_step_are_those_of_its_documents(pack: bool) -> None:
    """Padding does not count, and neither do held-out documents."""
    rows = make_rows(documents(), LENGTH, pack=pack)
    batches = SampleBatches(rows, VOCABULARY)
    run = run_of(batches, len(rows.ids_NT))
    assert WithHeldOut(batches, batches).tokens(1, run) == sum(len(one.tokens) for one in documents())
    sizes = [WithHeldOut(batches, batches).tokens(step, run_of(batches, 1)) for step in range(len(rows.ids_NT))]
    assert sorted(sizes) == sorted(rows.held_N2[:, 1])


def test_padding_changes_nothing(tmp_path: Path) -> None:
    """Of one document, the loss is that of the model without the padding."""
    checkpoint = save(tmp_path / "llama", "llama")
    sample = documents()[0]
    batches = SampleBatches(make_rows([sample], LENGTH, pack=False), VOCABULARY)
    run = run_of(batches, 1)
    learner = Learner(load_segment(checkpoint, 0, UNITS), run)
    (loss,) = learner.forward(0, 0, 0, UNITS, *batches.microbatch(0, 0, run))
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path)
    labels = [token if counts else NO_LABEL for token, counts in zip(*sample, strict=True)]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([sample.tokens]), labels=torch.tensor([labels])).loss
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_a_short_window_takes_one_document_a_row(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "mistral", "mistral", sliding_window=8)
    assert not can_pack(checkpoint.family.config, LENGTH) and can_pack(checkpoint.family.config, 8)
    with pytest.raises(ProtocolError, match="one document only"):
        step(checkpoint, (0, UNITS), pack=True)


def test_samples_of_a_step_are_drawn_twice_however_many_microbatches_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SampleBatches(make_rows(documents(), LENGTH, pack=False), VOCABULARY)
    run, drawn = run_of(rows, 7), list[int]()
    usual = batches._drawn

    def counted(place: int, samples: int, seed: int) -> int:
        drawn.append(place)
        return usual(place, samples, seed)

    monkeypatch.setattr(batches, "_drawn", counted)
    shares = [float(rows.microbatch(1, number, run).labels[1]) for number in range(run.microbatches)]
    assert len(drawn) == 2 * run.batch, "once for the rows, and once for their shares"
    labels = [int((rows.microbatch(1, number, run).labels[0] >= 0).sum()) for number in range(run.microbatches)]
    assert shares == pytest.approx([7 * count / sum(labels) for count in labels])


@pytest.mark.parametrize("layers", [1, 3])
def test_all_layers_keep_one_mask(tmp_path: Path, layers: int) -> None:
    """It is as large as the ledger counts it."""
    segment = load_segment(
        save(tmp_path / "llama", "llama", num_hidden_layers=layers, max_position_embeddings=512), 0, layers + 2
    )
    ids_BT, places_BT = torch.zeros(1, 512, dtype=torch.int64), torch.arange(512)[None] % 20
    kept_bytes = []
    for values in ((ids_BT,), (ids_BT, places_BT)):
        held: dict[int, int] = {}

        def keep(tensor: Tensor, held: dict[int, int] = held) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = segment.forward(values, 0, layers + 2, 0, (ids_BT,))
        kept_bytes.append(sum(held.values()))
        del outputs
    run = Run(bytes(32), 1, 1, 1, 512, label_weights=True)
    mask_bytes = segment.mask_bytes(run)
    assert kept_bytes[1] - kept_bytes[0] == pytest.approx(mask_bytes, rel=0.4), (
        "and positions, which small models notice"
    )
    assert not segment.mask_bytes(msgspec.structs.replace(run, label_weights=msgspec.UNSET))


def test_positions_that_jump_are_refused(tmp_path: Path) -> None:
    segment = load_segment(save(tmp_path / "llama", "llama"), 0, 2)
    ids_BT = torch.zeros(1, 4, dtype=torch.int64)
    for bad in ([0, 2, 3, 4], [1, 2, 3, 4], [0, 1, -1, 0]):
        with pytest.raises(ProtocolError, match="count up"):
            segment.forward((ids_BT, torch.tensor([bad])), 0, 2, 0)
    with pytest.raises(ProtocolError, match="wrong dtype or shape"):
        segment.forward((ids_BT, torch.zeros(1, 3, dtype=torch.int64)), 0, 2, 0)


def test_samples_without_a_label_within_a_row_are_left_out_and_told() -> None:
    """Only samples that stay count as cut."""
    late = [TokenSample([1] * 20, [place >= first for place in range(20)]) for first in (5, 17)]
    batches = SampleBatches(make_rows([*documents(), *late], LENGTH, pack=False), VOCABULARY)
    told = str(batches.summary(run_of(batches, 8)))
    assert told.startswith("8 samples, 1 of them cut to --sequence tokens, ")
    assert told.endswith("; 4 epochs; 1 left out: no label within --sequence tokens")


def test_samples_that_teach_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="no sample has a label"):
        make_rows([TokenSample([1, 2, 3], [True, False, False])], LENGTH, pack=True)
    with pytest.raises(UsageError, match="no sample"):
        make_rows([], LENGTH, pack=True)
    rows = make_rows([TokenSample([1, 70], [True, True])], LENGTH, pack=True)
    with pytest.raises(UsageError, match="vocabulary mismatch"):
        SampleBatches(rows, VOCABULARY)
