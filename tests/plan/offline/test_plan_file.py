"""Plans in files, and those that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarmnode.errors import UsageError
from swarmnode.plan.offline.planner_files import NOTHING, PlanFile
from swarmnode.plan.view import Span

PLAN = {
    "stages": [{"units": [0, 2], "devices": [3, 1]}, {"units": [2, 6], "devices": [0]}],
    "pipelines": [[3, 0]],
    "peers": ["a", "b", "c", "d"],
    "swarm": "0101",
}


def load(folder: Path, **changes: Any) -> PlanFile:
    path = folder / "plan.json"
    path.write_text(json.dumps({**PLAN, **changes}))
    return PlanFile.load(path)


def test_who_holds_what(tmp_path: Path) -> None:
    plan = load(tmp_path)
    assert plan.spans(4, 6) == [Span(2, 6), Span(0, 2), NOTHING, Span(0, 2)]
    assert plan.pipelines == ((3, 0),)
    plan.check_swarm("0101")
    assert plan.span_of("a", 6) == Span(2, 6)
    assert plan.span_of("c", 6) == plan.span_of("came later", 6) == NOTHING


def test_a_plan_for_something_else_is_refused(tmp_path: Path) -> None:
    plan = load(tmp_path)
    for words, use in (
        ("for 6 layers, and the model has 7", lambda: plan.spans(4, 7)),
        ("names device 3, but the network has 3", lambda: plan.spans(3, 6)),
        ("for 6 layers, and the model has 7", lambda: plan.span_of("a", 7)),
        ("not for this swarm", lambda: plan.check_swarm("0202")),
        ("names device 3, but the network has 2", lambda: load(tmp_path, peers=["a", "b"]).check_swarm("0101")),
    ):
        with pytest.raises(UsageError, match=words):
            use()


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": []},
        {"stages": [{"units": [1, 6], "devices": [0]}]},
        {"stages": [{"units": [0, 2], "devices": [0]}, {"units": [3, 6], "devices": [1]}]},
        {"stages": [{"units": [0, 0], "devices": [0]}]},
        {"stages": [{"units": [0, 2.5], "devices": [0]}]},
        {"stages": [{"units": [0, 2], "devices": ["x"]}]},
        {"peers": ["a", "b", "c", "a"]},
        {"stages": 3},
        {"stages": [{"units": [0, 2], "devices": [0, 1]}, {"units": [2, 6], "devices": [1]}]},
        {"pipelines": None},
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="not a plan as"):
        load(tmp_path, **changes)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        PlanFile.load(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(UsageError, match="it is not a JSON object"):
        PlanFile.load(tmp_path / "list.json")
