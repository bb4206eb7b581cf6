"""A step over microbatches of unequal numbers of labels is that of the whole batch, as transformers' Trainer makes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.compute.graph.boundary import array_batches
from swarmnode.compute.graph.exporting.export import export_module
from swarmnode.compute.graph.graph import Graph
from swarmnode.compute.graph.label_count import label_count
from swarmnode.compute.graph.partition import partition
from swarmnode.compute.graph.segment import GraphSegment
from swarmnode.compute.training.datasets.batches import ArrayBatches
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.local import train_locally
from swarmnode.errors import ProtocolError, UsageError
from swarmnode.swarm.records.run import Run, check_run, decode_run, differences, encode_run
from swarmnode.training.worker.part_loading import dummy_run_s
from tests.compute.graph.models import split

WIDTH, POSITIONS, WORDS, SAMPLES, STEPS = 8, 5, 11, 12, 6
EXACT = 2e-6  # of six steps of AdamW


class Tagger(nn.Module):
    """Gives a word to each position, but where its label is -100."""

    def __init__(self, way: str = "ignored") -> None:
        super().__init__()
        self.way = way
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS))
        self.register_buffer("share", torch.ones(WORDS))

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        scores, labels = self.net(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        if self.way == "masked":  # a mean by hand
            counts = (labels != -100).float()
            each = functional.cross_entropy(scores, labels.clamp(min=0), reduction="none")
            return (each * counts).sum() / counts.sum()
        loss = functional.cross_entropy(scores, labels, weight=self.share if self.way == "weighted" else None)
        return {"loss": 1 * loss + (0.1 * scores.square().mean() if self.way == "with more" else 0)}


def arrays() -> dict[str, np.ndarray]:
    """Rows with one to five labels; those of a microbatch that will be drawn have none at all."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, WORDS, (SAMPLES, POSITIONS))
    for row in range(SAMPLES):
        labels[row, 1 : row % (POSITIONS + 1)] = -100
    labels[::3] = -100
    return {"x": generator.normal(size=(SAMPLES, POSITIONS, WIDTH)).astype(np.float32), "labels": labels}


def exported(way: str) -> tuple[Graph, dict[str, Tensor], nn.Module]:
    torch.manual_seed(0)
    module = Tagger(way)
    batch = {"x": torch.randn(2, POSITIONS, WIDTH), "labels": torch.randint(0, WORDS, (2, POSITIONS))}
    found = export_module(module, batch)
    weights = {name: tensor.clone() for name, tensor in found.weights.items()}
    return partition(found.graph).graph, weights, module


@pytest.fixture
def data(tmp_path: Path) -> Callable[[dict[str, np.ndarray]], Path]:
    def write(given: dict[str, np.ndarray]) -> Path:
        np.savez(tmp_path / "data.npz", **given)  # type: ignore[arg-type]
        return tmp_path / "data.npz"

    return write


def run_of(batches: ArrayBatches, **changes: Any) -> Run:
    settings = {
        "steps": STEPS,
        "batch": 6,
        "microbatch": 2,
        "clip": 0.0,
        "learning_rate": 1e-2,
        "schedule": "constant",
        "weight_decay": 0.0,
    }
    return Run(data=batches.fingerprint, **{**settings, "label_weights": True, **changes})


@pytest.mark.parametrize("way", ["ignored", "masked"])
def test_unequal_microbatches_train_as_the_whole_batch(way: str, data: Callable[..., Path]) -> None:
    graph, weights, module = exported(way)
    batches = array_batches(data(arrays()), graph)
    assert batches.weighs_labels
    run = run_of(batches)
    weighed = [float(batches.microbatch(0, number, run).labels[-1]) for number in range(run.microbatches)]
    assert sum(weighed) == pytest.approx(len(weighed)) and len(set(weighed)) > 1
    segment = GraphSegment(graph, weights, 0, graph.units)
    losses = [report.loss for report in train_locally(segment, run, batches)]
    as_they_are = msgspec.structs.replace(run, label_weights=msgspec.UNSET)
    adam = torch.optim.AdamW(module.parameters(), 1e-2, betas=run.betas, weight_decay=run.weight_decay)
    for step, loss in enumerate(losses):
        parts = [batches.microbatch(step, number, as_they_are) for number in range(run.microbatches)]
        x, labels = (torch.cat([[*part.inputs, *part.labels][place] for part in parts]) for place in (0, 1))
        whole = functional.cross_entropy(module.net(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        whole.backward()
        assert loss == pytest.approx(whole.item(), rel=EXACT)
        adam.step()
        adam.zero_grad()
    trained = {name: tensor for named in segment.parameters().values() for name, tensor in named.items()}
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(trained[name], parameter, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_microbatch_without_labels_counts_as_nothing(cut: int, data: Callable[..., Path]) -> None:
    graph, weights, _ = exported("ignored")
    batches = array_batches(data(arrays()), graph)
    cuts = [0, graph.units] if cut == 0 else [0, graph.units // 2, graph.units]
    run = run_of(batches, batch=SAMPLES)
    learners = [
        Learner(GraphSegment(graph, weights, start, end), run, recompute=cut == 2) for start, end in pairwise(cuts)
    ]
    microbatches = [batches.microbatch(0, number, run) for number in range(run.microbatches)]
    number, (values, labels) = next(one for one in enumerate(microbatches) if not one[1].labels[-1])
    for learner in learners:
        segment = learner.segment
        values = learner.forward(0, number, segment.start, segment.end, values, labels)
    assert values[0].item() == 0
    gradients: tuple[Tensor | None, ...] = ()
    for learner in reversed(learners):
        gradients = learner.backward(0, gradients)
        assert learner.squared_norm(learner.blocks) == 0
        assert all(mask == 1 << number for mask in learner.counted.values())


def test_data_without_labels_are_refused(data: Callable[..., Path]) -> None:
    graph, _, _ = exported("ignored")
    batches = array_batches(data({**arrays(), "labels": np.full((SAMPLES, POSITIONS), -100)}), graph)
    with pytest.raises(UsageError, match="no sample of the data has a label"):
        batches.labelled(run_of(batches))


def test_what_is_no_mean_over_labels_is_not_weighed(data: Callable[..., Path]) -> None:
    assert label_count(exported("weighted")[0]) is None
    graph, _, _ = exported("with more")
    assert label_count(graph) is not None, "one mean over labels among what is added up"
    even = arrays()
    even["labels"] = abs(even["labels"]) % WORDS
    assert not array_batches(data(even), graph).weighs_labels


def test_labels_of_such_a_run_end_with_a_weight() -> None:
    graph, weights, _ = exported("ignored")
    learner = Learner(GraphSegment(graph, weights, 0, graph.units), run_of(ArrayBatches(arrays())))
    values, labels = split(graph, {name: torch.from_numpy(array[:2]) for name, array in arrays().items()})
    for bad in (torch.tensor(-1.0), torch.tensor(1e9), torch.tensor(math.nan), torch.ones(2), torch.tensor(1)):
        with pytest.raises(ProtocolError, match="do not end with the weight"):
            learner.forward(0, 0, 0, graph.units, values, (*labels, bad))
    with pytest.raises(ProtocolError, match="do not end with the weight"):
        learner.forward(0, 0, 0, graph.units, values)
    assert dummy_run_s(learner, 0, graph.units, iter(range(100)).__next__) > 0


def test_runs_of_before_keep_their_ids() -> None:
    run = Run(data=bytes(32), steps=1, batch=4, microbatch=2)
    assert b"label_weights" not in encode_run(run)
    weighs = msgspec.structs.replace(run, label_weights=True)
    assert decode_run(encode_run(weighs)) == weighs and weighs.weighs_labels and weighs.id != run.id
    assert differences(weighs, run) == ["The setting 'label weights' is True here and False there."]
    for bad in ({"label_weights": False}, {"sequence": 8}):
        with pytest.raises(UsageError, match="label weights of a module"):
            check_run(msgspec.structs.replace(weighs, **bad))
