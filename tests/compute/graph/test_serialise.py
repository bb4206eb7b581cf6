"""Graph files come from strangers: what is not as it must be is refused before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarmnode.compute.graph.boundary import Layout
from swarmnode.compute.graph.graph import resolve
from swarmnode.compute.graph.graph_segment import load_segment
from swarmnode.compute.graph.serialise import GRAPH_FILE, decode_graph, encode_graph, read_graph
from swarmnode.errors import CheckpointError

Tree = dict[str, Any]


@pytest.fixture(scope="module")
def raw(folder: Callable[[str], Path]) -> bytes:
    """The file of the awkward module's graph."""
    return (folder("awkward") / GRAPH_FILE).read_bytes()


def test_a_graph_survives_its_file(raw: bytes) -> None:
    graph = decode_graph(raw)
    assert encode_graph(graph) == raw
    assert decode_graph(encode_graph(graph)) == graph
    assert b'"real"' in raw and b"-inf" in raw  # what JSON cannot write


def set_operator(name: str) -> Callable[[Tree], None]:
    return lambda tree: tree["nodes"][0].update(operator=name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_operator("aten.from_file.default"), "not one that a graph may use"),
        (set_operator("aten.relu_.default"), "not one that a graph may use"),
        (set_operator("aten.add.out"), "writes into its arguments"),
        (set_operator("aten.empty.memory_format"), "not one that a graph may use"),
        (set_operator("prims.add.default"), "not one that a graph may use"),
        (set_operator("os.system"), "not one that a graph may use"),
        (set_operator("aten.add.__class__"), "unknown to this version"),
        (set_operator("aten.add"), "not one that a graph may use"),
        (lambda tree: tree.update(format=2), "format 1"),
        (lambda tree: tree.update(cuts=[5, 5]), "units of at least one node"),
        (lambda tree: tree.update(cuts=[0]), "units of at least one node"),
        (lambda tree: tree.update(cuts=[1 << 40]), "units of at least one node"),
        (lambda tree: tree.update(batch=0), "a batch of at least one sample"),
        (lambda tree: tree.update(nodes=[]), "a bounded number of nodes"),
        (lambda tree: tree.update(inputs=[]), "a bounded number of inputs"),
        (lambda tree: tree["nodes"].reverse(), "before it exists"),
        (lambda tree: tree["nodes"][1].update(name=tree["nodes"][0]["name"]), "two values named"),
        (lambda tree: tree["nodes"][0].update(types=[]), "too many arguments or results"),
        (lambda tree: tree["nodes"][0].update(args=[1] * 65), "too many arguments or results"),
        (lambda tree: tree["nodes"][0].update(args=[[1] * 5000]), "a list of 5000"),
        (lambda tree: tree["nodes"][0].update(args=["x" * 2000]), "text that is too long"),
        (lambda tree: tree["nodes"][0].update(args=[{"is": "torch", "name": "load"}]), "no dtype or format"),
        (lambda tree: tree["nodes"][0].update(args=[{"is": "real", "text": "1e9"}]), "an invalid float"),
        (lambda tree: tree["nodes"][0].update(args=[{"is": "code", "text": "1"}]), "damaged"),
        (
            lambda tree: tree["nodes"][0].update(args=[{"is": "value", "name": "loss", "item": 3}]),
            "before it exists",
        ),
        (lambda tree: tree["nodes"][0].update(args=[{"is": "size", "coefficients": [1] * 9}]), "impossible size"),
        (lambda tree: tree["nodes"][0]["types"][0].update(shape=[1] * 17), "impossible type"),
        (lambda tree: tree["nodes"][0]["types"][0].update(dtype="strided"), "impossible type"),
        (lambda tree: tree["weights"][0].update(kind="pickle"), "unknown kind"),
        (lambda tree: tree["weights"][1].update(tensor=tree["weights"][0]["tensor"]), "every weight once"),
        (lambda tree: tree["moves"][0].update(buffer="image"), "which is not a buffer"),
        (lambda tree: tree.update(loss={"is": "value", "name": "nothing"}), "before it exists"),
        (lambda tree: tree.pop("nodes"), "damaged"),
        (lambda tree: tree.update(nodes={}), "damaged"),
    ],
)
def test_tampered_graphs_are_refused(raw: bytes, change: Callable[[Tree], None], words: str) -> None:
    tree = json.loads(raw)
    change(tree)
    with pytest.raises(CheckpointError, match=words):
        decode_graph(json.dumps(tree).encode())


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"format": 1', b"[" * 100_000])
def test_files_that_are_no_graph_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / GRAPH_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=GRAPH_FILE):
        read_graph(tmp_path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not readable"):
        read_graph(tmp_path)


def test_weights_used_here_and_there_are_refused(raw: bytes) -> None:
    tree = json.loads(raw)
    tree["cuts"] = list(range(1, len(tree["nodes"])))
    with pytest.raises(CheckpointError, match="only the first and the last layer may share"):
        Layout(decode_graph(json.dumps(tree).encode()))


def test_missing_weights_are_named(folder: Callable[[str], Path], tmp_path: Path) -> None:
    tree = json.loads((folder("unet") / GRAPH_FILE).read_bytes())
    tree["weights"][0]["tensor"] = "elsewhere"
    (tmp_path / GRAPH_FILE).write_text(json.dumps(tree))
    (tmp_path / "model.safetensors").write_bytes((folder("unet") / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="needs the tensor elsewhere"):
        load_segment(tmp_path, 0, 1)


def test_allowed_operators_exist_here() -> None:
    for operator in ("aten.linear.default", "aten.batch_norm.default", "aten.scaled_dot_product_attention.default"):
        assert resolve(operator)._schema.name == operator.rpartition(".")[0].replace(".", "::")  # type: ignore[attr-defined]
