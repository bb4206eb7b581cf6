"""A run in one process learns real text, twice the same to the bit, and stops before a bad step."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.datasets.batches import ArrayBatches, TokenBatches, read_corpus
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.local import StepSummary, train_locally
from swarmnode.compute.training.segment import Segment
from swarmnode.compute.training.snapshot import LocalState
from swarmnode.errors import CheckpointError, NotFinite, UsageError
from tests.compute.training.conftest import VOCABULARY, make_run
from tests.compute.training.toy import CLASSES, FEATURES, ToySegment

Get = Callable[[str], Checkpoint]
STEPS = 30


@pytest.fixture(scope="module")
def text() -> TokenBatches:
    """A source file of the standard library, its characters squeezed into the tiny models' vocabulary."""
    tokens = read_corpus(Path(heapq.__file__), lambda document: [ord(letter) % VOCABULARY for letter in document])
    return TokenBatches(tokens, VOCABULARY)


def learn(checkpoint: Checkpoint, text: TokenBatches) -> list[StepSummary]:
    run = make_run(data=text.fingerprint, steps=STEPS, learning_rate=1e-2, sequence=16, batch=12, microbatch=4)
    segment = load_segment(checkpoint, 0, checkpoint.units)
    return list(train_locally(segment, run, text))


def test_it_learns_real_text_the_same_each_time(checkpoint: Get, text: TokenBatches) -> None:
    first, second = (learn(checkpoint("gpt2-dropout"), text) for _ in range(2))
    assert [report.loss for report in first] == [report.loss for report in second]
    assert [report.step for report in first] == list(range(STEPS))
    assert np.mean([report.loss for report in first[-5:]]) < first[0].loss - 1.0
    assert all(report.norm > 0 and report.tokens_per_s > 0 for report in first)


def digits() -> ArrayBatches:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(24, FEATURES)).astype(np.float32)
    return ArrayBatches({"x": x, "labels": generator.integers(0, CLASSES, 24)}, ["x"], ["labels"])


def test_a_bad_step_is_not_taken() -> None:
    segment, batches = ToySegment(breaks=1), digits()
    before = [parameter.detach().clone() for module in segment.modules for parameter in module.parameters()]
    run = make_run(data=batches.fingerprint, batch=12, microbatch=4, sequence=0)
    with pytest.raises(NotFinite) as caught:
        next(train_locally(segment, run, batches))
    assert caught.value.unit == 1
    after = [parameter for module in segment.modules for parameter in module.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_what_does_not_fit_is_told() -> None:
    batches = digits()
    run = make_run(data=batches.fingerprint, batch=12, microbatch=4, sequence=0)
    with pytest.raises(UsageError, match="settings are for other data"):
        next(train_locally(ToySegment(), make_run(batch=12, microbatch=4), batches))
    with pytest.raises(UsageError, match=r"whole model, not layers \[1:3\)"):
        next(train_locally(ToySegment(1, 3), run, batches))


def test_a_run_goes_on_from_its_state(checkpoint: Get, text: TokenBatches, tmp_path: Path) -> None:
    """The losses are those of a run that was never stopped; a damaged or another run's state is refused."""
    run = make_run(data=text.fingerprint, steps=6, sequence=16, batch=12, microbatch=4, checkpoint_steps=100)
    model, state = checkpoint("gpt2-dropout"), LocalState(tmp_path / "state")

    def segment() -> Segment:
        return load_segment(model, 0, model.units)

    whole = [report.loss for report in train_locally(segment(), run, text)]
    steps = train_locally(segment(), run, text, state=state)
    first = [next(steps).loss, next(steps).loss]
    steps.close()
    rest = list(train_locally(segment(), run, text, state=state))
    assert [*first, *(report.loss for report in rest)] == whole and rest[0].step == 2
    assert list(train_locally(segment(), run, text, state=state)) == [], "it is over"
    with pytest.raises(UsageError, match="other settings or data"):
        next(train_locally(segment(), msgspec.structs.replace(run, seed=8), text, state=state))
    (tmp_path / "state").rename(tmp_path / ".state.old")  # killed while the state was being replaced
    assert list(train_locally(segment(), run, text, state=state)) == [], "the one before is put back"
    (tmp_path / "state" / "block-1.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="not readable"):
        next(train_locally(segment(), run, text, state=state))
