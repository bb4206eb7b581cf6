"""What a module becomes when it is exported, and what people are told when it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from swarmnode.compute.graph.exporting.module_export import export_module, export_source, load_factory
from swarmnode.compute.graph.graph import BUFFER, CONSTANT, PARAMETER
from swarmnode.compute.graph.serialise import read_graph
from swarmnode.errors import UsageError
from tests.compute.graph.models import Awkward, Batch, batch_of, build

IMAGES = torch.zeros(4, 6)


class Broken(nn.Module):
    """Does one of the things that a graph cannot hold."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor | list[int]:
        x = self.linear(x)
        if self.way == "branch" and x.sum() > 0:
            x = x * 2
        if self.way == "item":
            for _ in range(int(x.sum())):
                x = x + 1
        if self.way == "numpy":
            x = torch.from_numpy(x.detach().numpy())
        if self.way == "operator":
            x = torch.igamma(x, x)
        if self.way == "error":
            raise KeyError("no such thing")
        if self.way == "no loss":
            return x
        return [1] if self.way == "list" else x.mean()


def factory() -> tuple[nn.Module, Batch]:
    return build("awkward"), batch_of("awkward", 4)


def returns_nothing() -> None:
    """A factory that forgot to return."""


def fails() -> None:
    raise ZeroDivisionError("by the user")


def test_weights_keep_their_names_and_their_kinds(folder: Callable[[str], Path]) -> None:
    graph = read_graph(folder("awkward"))
    weights = {weight.tensor: weight for weight in graph.weights}
    module = Awkward()
    assert dict(module.named_parameters()).keys() <= weights.keys()
    assert weights["middle.weight"].kind == PARAMETER and weights["middle.weight"].trained
    assert weights["frozen.weight"].kind == PARAMETER and not weights["frozen.weight"].trained
    assert {name for name, weight in weights.items() if weight.kind == BUFFER} == {
        "average", "normalization.running_mean", "normalization.running_var", "normalization.num_batches_tracked"
    }  # fmt: skip
    assert weights["scale"].kind == CONSTANT


def test_operators_stay_whole_and_write_nothing(folder: Callable[[str], Path]) -> None:
    operators = [node.operator for node in read_graph(folder("awkward")).nodes]
    assert operators[:3] == ["aten.conv2d.default", "aten.add.Tensor", "aten.batch_norm.default"]
    assert "aten.cross_entropy_loss.default" in operators
    assert not [operator for operator in operators if operator.split(".")[1].endswith("_")]


def test_a_module_is_left_as_it_was() -> None:
    module = build("awkward").eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    export_module(module, batch_of("awkward", 4))
    assert not module.training
    torch.testing.assert_close(module.state_dict(), before)


def test_a_batch_that_is_built_in_is_told() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * torch.arange(4.0)[:, None]).mean()

    graph = export_module(Fixed(), (IMAGES,)).graph
    assert not graph.any_batch and graph.batch == 4
    assert repr(graph) == f"Graph({len(graph.nodes)} nodes in 1 units, 0 weights, batches of 4)"


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("branch", ["Tensor.__bool__", "self.way == \"branch\" and x.sum() > 0", "data-dependent", "torch.where"]),
        ("item", ["range(int(x.sum()))", "data-dependent"]),
        ("numpy", ["Tensor.numpy", "x.detach().numpy()"]),
        ("operator", ["aten.igamma.default", "torch.igamma(x, x)"]),
        ("error", ["raise KeyError(\"no such thing\")"]),
        ("no loss", ["Broken returned a tensor of shape (4, 6)", "mean loss"]),
        ("list", ["Broken returned list"]),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_named(way: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        export_module(Broken(way), (IMAGES,))
    message = str(raised.value)
    assert [word for word in words if word not in message] == []
    assert way in ("no loss", "list") or "test_export.py" in message


def test_factories_are_found_by_name() -> None:
    module, example = load_factory(f"{__name__}:factory")
    assert isinstance(module, Awkward) and example.keys() == {"image", "label"}  # type: ignore[union-attr]
    assert export_source(f"{__name__}:factory").graph.any_batch


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nothing", "is no factory: write package.module:function"),
        ("no.such.module:factory", "there is no module no"),
        (f"{__name__}:missing", "has no function missing"),
        (f"{__name__}:returns_nothing", "must return a pair"),
        (f"{__name__}:fails", "ZeroDivisionError: by the user"),
        ("missing.pt2", "cannot be read"),
    ],
)
def test_bad_factories_are_explained(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        export_source(spec)


def test_examples_are_tensors() -> None:
    for example in ((), ([1, 2],), {"x": 3}):
        with pytest.raises(UsageError, match="must be a tuple of tensors"):
            export_module(build("awkward"), example)  # type: ignore[arg-type]
