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

from swarmnode.compute.graph.boundary import Layout, array_batches
from swarmnode.compute.graph.exporting.module_export import export_module
from swarmnode.compute.graph.graph import Graph
from swarmnode.compute.graph.graph_segment import GraphSegment
from swarmnode.compute.graph.label_count import label_means
from swarmnode.compute.graph.partition import partition
from swarmnode.compute.graph.serialise import decode_graph, encode_graph
from swarmnode.compute.training.datasets.batches import ArrayBatches, Microbatch
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.local import train_locally
from swarmnode.errors import ProtocolError, UsageError
from swarmnode.swarm.records.run import Run, check_run, decode_run, differences, encode_run
from swarmnode.training.worker.training_parts import dummy_run_s
from tests.compute.graph.models import split

WIDTH, POSITIONS, WORDS, SAMPLES, STEPS = 8, 5, 11, 12, 6
EXACT = 2e-6  # of six steps of AdamW


Way = Callable[["Tagger", Tensor, Tensor], Any]


class Tagger(nn.Module):
    """Gives a word to each position, but where its label is -100; with a loss of its own."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS))
        self.kind = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.register_buffer("share", torch.rand(WORDS))

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.way(self, x, labels)

    def scores(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


def ignored(m: Tagger, x: Tensor, labels: Tensor) -> Any:
    return {"loss": 1 * functional.cross_entropy(*m.scores(x, labels))}


def masked(m: Tagger, x: Tensor, labels: Tensor, least: float = 0, *, mean: bool = False) -> Any:
    """A mean by hand."""
    scores, labels = m.scores(x, labels)
    counts = (labels != -100).float()
    each = functional.cross_entropy(scores, labels.clamp(min=0), reduction="none")
    return (each * counts).mean() / counts.mean() if mean else (each * counts).sum() / counts.sum().clamp(min=least)


def weighted_by_hand(m: Tagger, x: Tensor, labels: Tensor) -> Any:
    scores, labels = m.scores(x, labels)
    shares = m.share[labels.clamp(min=0)] * (labels != -100)
    return (functional.cross_entropy(scores, labels, reduction="none") * shares).sum() / shares.sum()


def weighted(m: Tagger, x: Tensor, labels: Tensor) -> Any:
    return functional.cross_entropy(*m.scores(x, labels), weight=m.share)


def kinds(m: Tagger, x: Tensor, labels: Tensor) -> Tensor:
    """Of each sample, one label, which is left out where the last word's is."""
    return functional.cross_entropy(m.kind(x[:, 0]), torch.where(labels[:, -1] < 0, -100, labels[:, -1] % 3))


def chosen(m: Tagger, x: Tensor, labels: Tensor) -> Tensor:
    """Labels that the module leaves out itself."""
    scores, labels = m.scores(x, labels)
    return functional.cross_entropy(scores, labels.masked_fill(labels < 4, 0), ignore_index=0)


WAYS: dict[str, Way] = {
    "ignored": ignored,
    "smoothed": lambda m, x, y: functional.cross_entropy(*m.scores(x, y), label_smoothing=0.1),
    "log-likelihood": lambda m, x, y: functional.nll_loss((s := m.scores(x, y))[0].log_softmax(-1), s[1]),
    "left out by the module": chosen,
    "masked": masked,
    "masked, at least one": lambda m, x, y: masked(m, x, y, 1),
    "mean of the masked": lambda m, x, y: masked(m, x, y, mean=True),
    "weighted": weighted,
    "weighted by hand": weighted_by_hand,
    "with more": lambda m, x, y: ignored(m, x, y)["loss"] + 0.1 * m.net(x).square().mean(),
    "two means": lambda m, x, y: 0.7 * ignored(m, x, y)["loss"] + kinds(m, x, y),
    "two of them in a row": lambda m, x, y: torch.stack([chosen(m, x, y), kinds(m, x, y)]).mean(),
    "four kinds": lambda m, x, y: (
        weighted(m, x, y) - kinds(m, x, y) / 4 + masked(m, x, y, 1) + m.kind(x).square().mean()
    ),
    "learned scales": lambda m, x, y: (
        chosen(m, x, y) * (-m.scale[0]).exp() + kinds(m, x, y) * (-m.scale[1]).exp() + m.scale.sum()
    ),
}
"""Losses of means over labels, added up."""


def probability(m: Tagger, x: Tensor, y: Tensor) -> Any:
    return 1 - (-ignored(m, x, y)["loss"]).exp()


def arrays() -> dict[str, np.ndarray]:
    """Rows with one to five labels; those of a microbatch that will be drawn have none at all."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, WORDS, (SAMPLES, POSITIONS))
    for row in range(SAMPLES):
        labels[row, 1 : row % (POSITIONS + 1)] = -100
    labels[::3] = -100
    return {"x": generator.normal(size=(SAMPLES, POSITIONS, WIDTH)).astype(np.float32), "labels": labels}


def exported(way: Way) -> tuple[Graph, dict[str, Tensor], nn.Module]:
    torch.manual_seed(0)
    module = Tagger(way)
    batch = {"x": torch.randn(2, POSITIONS, WIDTH), "labels": torch.randint(0, WORDS, (2, POSITIONS))}
    found = export_module(module, batch)
    weights = {name: tensor.clone() for name, tensor in found.weights.items()}
    return decode_graph(encode_graph(partition(found.graph).graph)), weights, module


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


@pytest.mark.parametrize("way", WAYS)
def test_unequal_microbatches_train_as_the_whole_batch(way: str, data: Callable[..., Path]) -> None:
    graph, weights, module = exported(WAYS[way])
    batches = array_batches(data(arrays()), graph)
    assert batches.weighs_labels
    run = run_of(batches)
    weighed = torch.stack([batches.microbatch(0, number, run).labels[-1] for number in range(run.microbatches)])
    assert weighed.shape[1] == len(label_means(graph)) and weighed[:, 0].unique().numel() > 1
    segment = GraphSegment(graph, weights, 0, graph.units)
    losses = [report.loss for report in train_locally(segment, run, batches)]
    as_they_are = msgspec.structs.replace(run, label_weights=msgspec.UNSET)
    adam = torch.optim.AdamW(module.parameters(), 1e-2, betas=run.betas, weight_decay=run.weight_decay)
    for step, loss in enumerate(losses):
        parts = [batches.microbatch(step, number, as_they_are) for number in range(run.microbatches)]
        x, labels = (torch.cat([named(graph, part)[name] for part in parts]) for name in ("x", "labels"))
        output = module(x, labels)
        whole = output["loss"] if isinstance(output, dict) else output
        whole.backward()
        assert loss == pytest.approx(whole.item(), rel=EXACT)
        adam.step()
        adam.zero_grad()
    trained = {name: tensor for named in segment.parameters().values() for name, tensor in named.items()}
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter, module.get_parameter(name), rtol=0, atol=1e-5)


def named(graph: Graph, part: Microbatch) -> dict[str, Tensor]:
    layout = Layout(graph)
    values = zip((*layout.boundaries[0], *layout.labels), (*part.inputs, *part.labels), strict=True)
    return {value.ref.name.removeprefix("kwargs_"): tensor for value, tensor in values}


@pytest.mark.parametrize("way", ["ignored", "masked", "two means", "weighted"])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_microbatch_without_labels_counts_as_nothing(way: str, cut: int, data: Callable[..., Path]) -> None:
    graph, weights, _ = exported(WAYS[way])
    batches = array_batches(data(arrays()), graph)
    cuts = [0, graph.units] if cut == 0 else [0, graph.units // 2, graph.units]
    run = run_of(batches, batch=SAMPLES, microbatch=1)
    learners = [
        Learner(GraphSegment(graph, weights, start, end), run, recompute=cut == 2) for start, end in pairwise(cuts)
    ]
    microbatches = [batches.microbatch(0, number, run) for number in range(run.microbatches)]
    number, (values, labels) = next(one for one in enumerate(microbatches) if not one[1].labels[-1].any())
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
    graph, _, _ = exported(ignored)
    with pytest.raises(UsageError, match="no sample of the data has a label"):
        array_batches(data({**arrays(), "labels": np.full((SAMPLES, POSITIONS), -100)}), graph)


def test_even_labels_are_not_weighed(data: Callable[..., Path]) -> None:
    even = arrays()
    even["labels"] = abs(even["labels"]) % WORDS
    for way in (ignored, WAYS["with more"], probability):
        graph, _, _ = exported(way)
        assert not array_batches(data(even), graph).weighs_labels


def test_means_that_are_not_added_up_are_refused_where_labels_are_uneven(data: Callable[..., Path]) -> None:
    graph, _, _ = exported(probability)
    with pytest.raises(UsageError, match=r"takes their mean through aten\.exp\.default, so that it cannot be made of"):
        array_batches(data(arrays()), graph)


@pytest.mark.parametrize(
    ("way", "told"),
    [
        (lambda m, x, y: 1 - (-weighted(m, x, y)).exp(), "write it as a sum of means"),
        (
            lambda m, x, y: functional.cross_entropy(*m.scores(x, y), weight=m.net[0].bias[0].detach().expand(WORDS)),
            "draws",
        ),
        (lambda m, x, y: functional.cross_entropy(*m.scores(x, y.where(torch.rand(y.shape) > 0.5, -100))), "draws"),
    ],
)
def test_counts_that_nobody_knows_beforehand_are_refused(way: Way, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        exported(way)


def test_labels_of_such_a_run_end_with_a_weight() -> None:
    graph, weights, _ = exported(ignored)
    learner = Learner(GraphSegment(graph, weights, 0, graph.units), run_of(ArrayBatches(arrays())))
    values, labels = split(graph, {name: torch.from_numpy(array[:2]) for name, array in arrays().items()})
    for bad in (
        -torch.ones(1),
        torch.tensor([1e9]),
        torch.tensor([math.nan]),
        torch.ones(2),
        torch.ones(()),
        torch.tensor([1]),
    ):
        with pytest.raises(ProtocolError, match="do not end with the shares"):
            learner.forward(0, 0, 0, graph.units, values, (*labels, bad))
    with pytest.raises(ProtocolError, match="do not end with the shares"):
        learner.forward(0, 0, 0, graph.units, values)
    assert dummy_run_s(learner, 0, graph.units, iter(range(100)).__next__) > 0


def test_runs_of_before_keep_their_ids() -> None:
    run = Run(data=bytes(32), steps=1, batch=4, microbatch=2)
    assert b"label_weights" not in encode_run(run)
    weighs = msgspec.structs.replace(run, label_weights=True)
    assert decode_run(encode_run(weighs)) == weighs and weighs.weighs_labels and weighs.id != run.id
    assert differences(weighs, run) == ["The setting 'label weights' is True here and False there."]
    for bad in ({"label_weights": False},):
        with pytest.raises(UsageError, match="label weights, or none"):
            check_run(msgspec.structs.replace(weighs, **bad))
