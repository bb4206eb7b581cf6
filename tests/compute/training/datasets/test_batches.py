"""Batches are a pure function of data, run, step and number; what cannot be trained on is told in a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.compute.training.datasets.batches import ArrayBatches, Permutation, TokenBatches, read_corpus
from swarmnode.errors import UsageError
from swarmnode.swarm.records.run import Run


def run_of(batches: TokenBatches | ArrayBatches, **changes: int) -> Run:
    settings = {"steps": 10, "batch": 4, "microbatch": 2, "sequence": 5, "seed": 3, **changes}
    return Run(data=batches.fingerprint, **settings)


def tokens(count: int) -> TokenBatches:
    return TokenBatches(np.arange(count, dtype=np.uint32), count)


@given(st.integers(1, 3000), st.binary(max_size=8))
def test_a_permutation_hits_every_number_once(count: int, key: bytes) -> None:
    shuffle = Permutation(count, key)
    assert sorted(map(shuffle, range(count))) == list(range(count))


def test_permutations_differ_by_key() -> None:
    orders = {tuple(map(Permutation(50, bytes([key])), range(50))) for key in range(20)}
    assert len(orders) == 20


def test_an_epoch_draws_every_sample_once_and_the_next_in_another_order() -> None:
    batches = tokens(5 * 8)
    run = run_of(batches)
    epochs = []
    for epoch in range(2):
        steps = range(2 * epoch, 2 * epoch + 2)
        drawn = [
            batches.microbatch(step, number, run).inputs[0] for step in steps for number in range(run.microbatches)
        ]
        epochs.append([int(row[0]) // 5 for ids_BT in drawn for row in ids_BT])
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(8))
    assert epochs[0] != epochs[1]


def test_whoever_asks_gets_the_same() -> None:
    one, other = tokens(400), tokens(400)
    run = run_of(one)
    assert one.fingerprint == other.fingerprint != tokens(401).fingerprint
    last = one.microbatch(7, 1, run).inputs[0]
    assert torch.equal(last, other.microbatch(7, 1, run).inputs[0])
    assert last.dtype == torch.int64
    assert last.shape == (2, 5)
    assert not torch.equal(last, one.microbatch(7, 1, run_of(one, seed=4)).inputs[0])


def test_arrays_are_drawn_row_by_row() -> None:
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    batches = ArrayBatches({"x": x, "labels": np.arange(6)}, ["x"], ["labels"])
    (x_BF,), (labels_B,) = batches.microbatch(0, 1, run_of(batches))
    assert x_BF.shape == (2, 2) and labels_B.shape == (2,)
    assert torch.equal(x_BF[:, 0], labels_B.float() * 2)


def test_wrong_data_is_told() -> None:
    with pytest.raises(UsageError, match=r"vocabulary mismatch.*token 9.*model knows 9"):
        TokenBatches(np.arange(10, dtype=np.uint32), 9)
    short = tokens(4)
    with pytest.raises(UsageError, match="4 tokens, which is less than one sample of 5"):
        short.microbatch(0, 0, run_of(short))
    with pytest.raises(UsageError, match=r"differ in length: x 3, y 2"):
        ArrayBatches({"x": np.zeros(3), "y": np.zeros(2)})
    with pytest.raises(UsageError, match="no sample"):
        ArrayBatches({})


def test_a_corpus_is_its_documents_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("é")
    (tmp_path / "a.txt").write_text("hi")
    (tmp_path / "ignored.bin").write_bytes(b"\0\0")
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n\n{"text": "y"}\n')
    assert read_corpus(tmp_path).tolist() == [*b"hi", 0, *"é".encode(), 0, ord("x"), 0, ord("y"), 0]
    assert read_corpus(tmp_path / "a.txt", lambda text: [len(text)], 7).tolist() == [2, 7]


@pytest.mark.parametrize(
    ("name", "raw", "told"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"ab\0c", "a.txt is not text: it holds zero bytes"),
        ("a.txt", b"ab\xff", "a.txt is not UTF-8 text: byte 2"),
        ("a.jsonl", b'{"text": "x"}\nnonsense', "a.jsonl, line 2: not a JSON object"),
        ("a.jsonl", b'{"text": 3}', "line 1: its .text. is not text"),
        ("a.bin", b"x", "has no text files"),
    ],
)
def test_what_is_no_text_is_named(tmp_path: Path, name: str, raw: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UsageError, match=told):
        read_corpus(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        read_corpus(tmp_path / "nowhere")
