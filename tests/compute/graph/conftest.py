"""Exported and cut graphs, one per module and session, in folders as volunteers get them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swarmnode.compute.graph.exporting.module_export import export_module
from swarmnode.compute.graph.exporting.reader import Exported
from swarmnode.compute.graph.partition import partition
from swarmnode.compute.graph.serialise import write_graph
from tests.compute.graph.models import batch_of, build


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """kind -> the folder of its graph, exported with a batch of 4."""
    base = tmp_path_factory.mktemp("graphs")

    def get(kind: str) -> Path:
        path: Path = base / kind
        if not path.exists():
            path.mkdir()
            exported = export_module(build(kind), batch_of(kind, 4))
            write_graph(Exported(partition(exported.graph).graph, exported.weights), path)
        return path

    return get
