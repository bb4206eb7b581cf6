"""Exported programs are read as data: what would run code when it is loaded is refused, and runs nothing."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarmnode.compute.graph.archive import load_program
from swarmnode.compute.graph.exporting.module_export import export_module, export_source
from swarmnode.errors import UsageError
from tests.compute.graph.models import Awkward, batch_of, build

Edit = Callable[[dict[str, bytes]], None]


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class Tied(nn.Module):
    """Two names for one weight, and a size that depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).reshape(2 * x.shape[0], 2).square().sum() / x.shape[0]


def save(module: nn.Module, example: tuple[Tensor, ...], file: Path, *, is_dynamic: bool = True) -> None:
    shapes = tuple({0: torch.export.Dim.AUTO} for _ in example) if is_dynamic else None
    torch.export.save(torch.export.export(module, example, dynamic_shapes=shapes, strict=False), file)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Of the tied module."""
    file = tmp_path / "program.pt2"
    save(Tied(), (torch.randn(3, 4),), file)
    return file


def rewrite(file: Path, edit: Edit, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(file) as archive:
        content = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    edit(content)
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, raw in content.items():
            archive.writestr(f"program/{name}", raw)


def edit_json(name: str, change: Callable[[Any], None]) -> Edit:
    def edit(content: dict[str, bytes]) -> None:
        tree = json.loads(content[name])
        change(tree)
        content[name] = json.dumps(tree).encode()

    return edit


def test_a_program_becomes_the_same_graph_as_its_module(tmp_path: Path) -> None:
    module, batch = build("awkward"), batch_of("awkward", 4)
    save(module, tuple(batch.values()), tmp_path / "program.pt2")
    program, own = export_source(str(tmp_path / "program.pt2")), export_module(module, batch)
    assert [node.operator for node in program.graph.nodes] == [node.operator for node in own.graph.nodes]
    assert program.graph.any_batch
    torch.testing.assert_close(program.weights, own.weights)
    trained = {weight.tensor for weight in program.graph.weights if weight.trained}
    assert trained == {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def test_a_program_of_one_batch_stays_with_it(tmp_path: Path) -> None:
    save(Awkward(), tuple(batch_of("awkward", 4).values()), tmp_path / "program.pt2", is_dynamic=False)
    graph = export_source(str(tmp_path / "program.pt2")).graph
    assert not graph.any_batch and graph.batch == 4


def test_tied_weights_stay_tied(program: Path) -> None:
    module, (x,) = load_program(program)
    assert len(list(module.parameters())) == 3 and x.shape == (3, 4)
    torch.manual_seed(0)
    exported = export_module(module, (x,))
    assert len(exported.weights) == 3


def test_pickled_weights_are_refused(program: Path, tmp_path: Path) -> None:
    def pickle_one(content: dict[str, bytes]) -> None:
        edit_json("data/weights/model_weights_config.json", mark)(content)
        content["data/weights/weight_0"] = pickle.dumps(Bomb(tmp_path / "ran"))

    def mark(tree: Any) -> None:
        next(iter(tree["config"].values()))["use_pickle"] = True

    rewrite(program, pickle_one)
    with pytest.raises(UsageError, match="is a pickled object: reading it could run code"):
        load_program(program)
    assert not (tmp_path / "ran").exists()


def test_examples_that_are_more_than_tensors_are_refused(program: Path, tmp_path: Path) -> None:
    def put_bomb(content: dict[str, bytes]) -> None:
        buffer = io.BytesIO()
        torch.save(((Bomb(tmp_path / "ran"),), {}), buffer)
        content["data/sample_inputs/model.pt"] = buffer.getvalue()

    rewrite(program, put_bomb)
    with pytest.raises(UsageError, match="example batch is more than tensors"):
        load_program(program)
    assert not (tmp_path / "ran").exists()


def test_expressions_and_module_names_are_not_looked_at(program: Path, tmp_path: Path) -> None:
    code = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"

    def plant(tree: Any) -> None:
        graph = tree["graph_module"]["graph"]
        for meta in graph["tensor_values"].values():
            for size in meta["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = code
        signature = tree["graph_module"]["module_call_graph"][0]["signature"]
        context = {"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []}
        spec = {"type": "collections.defaultdict", "context": json.dumps(context), "children_spec": []}
        signature["in_spec"] = json.dumps([1, spec])
        tree["guards_code"] = [code]

    rewrite(program, edit_json("models/model.json", plant))
    assert export_source(str(program)).graph.any_batch
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten.from_file.default", "torch.ops.aten.set_.source_Storage", "os.system", "torch.ops.aten.igamma.default",
        "torch.ops.prim.print.default", "torch.ops.aten.linear.__class__", "_operator.attrgetter", "math.trunc",
    ],
)  # fmt: skip
def test_foreign_operators_are_refused(program: Path, target: str) -> None:
    def change(tree: Any) -> None:
        tree["graph_module"]["graph"]["nodes"][1]["target"] = target

    rewrite(program, edit_json("models/model.json", change))
    with pytest.raises(UsageError, match=r"is not one that a graph may use|is unknown to this version"):
        load_program(program)


def test_damaged_archives_are_refused(program: Path) -> None:
    whole = program.read_bytes()

    def drop(name: str) -> Edit:
        return lambda content: content.pop(name) and None  # type: ignore[func-returns-value]

    def decomposed(tree: Any) -> None:
        tree["verifiers"] = ["ATEN"]

    def too_far(tree: Any) -> None:
        next(iter(tree["config"].values()))["tensor_meta"]["storage_offset"] = {"as_int": 1 << 40}

    def big_endian(content: dict[str, bytes]) -> None:
        content["byteorder"] = b"big"

    for edit, words in (
        (drop("models/model.json"), "export it with torch 2.8 or newer"),
        (drop("data/weights/weight_0"), "damaged"),
        (edit_json("models/model.json", decomposed), "save it before run_decompositions"),
        (edit_json("models/model.json", lambda tree: tree.pop("graph_module")), "damaged"),
        (edit_json("data/weights/model_weights_config.json", too_far), "damaged"),
        (big_endian, "another byte order"),
    ):
        program.write_bytes(whole)
        rewrite(program, edit)
        with pytest.raises(UsageError, match=words):
            load_program(program)
    program.write_bytes(whole)
    rewrite(program, lambda content: None, zipfile.ZIP_DEFLATED)
    with pytest.raises(UsageError, match="compressed"):
        load_program(program)
    for raw in (b"", whole[: len(whole) // 2]):
        program.write_bytes(raw)
        with pytest.raises(UsageError, match="not an exported program"):
            load_program(program)
