"""Data as a model takes it; what does not fit is told with both sides of the misfit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.compute.graph.boundary import array_batches
from swarmnode.compute.graph.exporting.module_export import export_module
from swarmnode.compute.graph.graph import Graph
from swarmnode.compute.training.datasets.batches import token_batches
from swarmnode.errors import UsageError
from swarmnode.swarm.records.run import Run

SAMPLES = 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(self.linear(image.flatten(1)), label)


@pytest.fixture(scope="module", params=["by name", "in order"])
def graph(request: pytest.FixtureRequest) -> Graph:
    example = {"image": torch.zeros(4, 2, 3), "label": torch.zeros(4, dtype=torch.int64)}
    return export_module(Net(), example if request.param == "by name" else tuple(example.values())).graph


Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """An .npz with good arrays, some of them changed or (None) left out."""

    def write(**changes: np.ndarray | None) -> Path:
        good = {"image": np.arange(SAMPLES * 6.0).reshape(SAMPLES, 2, 3), "label": np.arange(SAMPLES, dtype=np.int32)}
        path = tmp_path / "data.npz"
        np.savez(path, **{name: array for name, array in {**good, **changes}.items() if array is not None})
        return path

    return write


def test_arrays_come_in_the_models_order_and_dtypes(graph: Graph, save: Save) -> None:
    batches = array_batches(save(unused=np.zeros(3)), graph)
    run = Run(data=batches.fingerprint, steps=3, batch=4, microbatch=4)
    (image, label), _ = batches.microbatch(0, 0, run)
    assert (image.dtype, label.dtype) == (torch.float32, torch.int64)
    assert image.shape == (4, 2, 3)
    assert torch.equal(image[:, 0, 0], label * 6.0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"label": None}, "no array 'label': the model takes image, label, the file has image"),
        ({"image": np.zeros((SAMPLES, 6))}, r"shape \(12, 6\), but the model takes samples of shape \(2, 3\)"),
        ({"label": np.zeros(SAMPLES)}, "'label' is of float64, but the model takes int64"),
        ({"label": np.zeros(SAMPLES - 1, dtype=int)}, "differ in length: image 12, label 11"),
        ({"image": np.zeros((0, 2, 3)), "label": np.zeros(0, dtype=int)}, "empty"),
        ({"image": np.array([{}] * SAMPLES, dtype=object)}, "plain numpy arrays"),
        ({"label": np.array(3)}, "first dimension"),
    ],
)
def test_arrays_that_do_not_fit(graph: Graph, save: Save, changes: dict[str, np.ndarray | None], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        array_batches(save(**changes), graph)


def test_what_is_no_file_of_arrays(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        array_batches(tmp_path / "none.npz", graph)
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(UsageError, match=r"is an \.npz file"):
        array_batches(tmp_path / "text.txt", graph)
    np.save(tmp_path / "pickle.npy", np.array([{}], dtype=object))
    (tmp_path / "pickle.npy").rename(tmp_path / "pickle.npz")
    with pytest.raises(UsageError, match="damaged"):
        array_batches(tmp_path / "pickle.npz", graph)


def test_text_is_bytes_or_the_tokenizers_tokens(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abc")
    run = Run(data=bytes(32), steps=1, batch=1, microbatch=1, sequence=4)
    assert token_batches(path, 256).rows([0], run).inputs[0].tolist() == [[97, 98, 99, 0]]
    batches = token_batches(path, 10, lambda text: [len(text), 1, 2], separator=9)
    assert batches.rows([0], run).inputs[0].tolist() == [[3, 1, 2, 9]]
    with pytest.raises(UsageError, match="vocabulary mismatch: the swarm has no tokenizer"):
        token_batches(path, 255)
    with pytest.raises(UsageError, match="vocabulary mismatch: the data has token 9"):
        token_batches(path, 9, lambda text: [1], separator=9)
