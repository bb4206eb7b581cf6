"""Scenario files: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmnode.errors import UsageError
from swarmnode.plan.offline.planner_files import MAX_DEVICES, Scenario


def values(**changes: Any) -> dict[str, Any]:
    return {
        "devices": 2,
        "region": ["Ohio", None],
        "delay_ms": [[0, 11], [12.5, 0]],
        "bandwidth_gbps": [[0, 1.5], [2, 100]],
        **changes,
    }


def load(folder: Path, content: Any) -> Scenario:
    file = folder / "home.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return Scenario.load(file)


def test_units_and_what_is_missing(tmp_path: Path) -> None:
    scenario = load(tmp_path, values())
    assert scenario.name == "home" and scenario.devices == 2
    assert scenario.regions == ("Ohio", None)
    np.testing.assert_array_equal(scenario.delay_s, [[0, 0.011], [0.0125, 0]])
    np.testing.assert_array_equal(scenario.bandwidth_bps, [[0, 1.5e9], [2e9, 100e9]])
    assert scenario.gpus == scenario.peak_flops == scenario.memory_bytes == (None, None)
    assert repr(scenario) == "Scenario('home', 2 devices in 2 regions)"


def test_cards(tmp_path: Path) -> None:
    cards = {"name": "x", "gpu": ["T4", None], "peak_tflops": [65, None], "memory_gb": [None, 24]}
    scenario = load(tmp_path, values(region=None, **cards))
    assert scenario.name == "x" and scenario.regions == (None, None)
    assert scenario.gpus == ("T4", None)
    assert scenario.peak_flops == (65e12, None)
    assert scenario.memory_bytes == (None, 24_000_000_000)


def test_matrices_cannot_be_written_to(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        load(tmp_path, values()).delay_s[0, 1] = 1.0


BAD: dict[str, tuple[Any, str]] = {
    "a peer twice": (values(peer=["12D3A", "12D3A"]), r"peer\[1\] is the same as peer\[0\]"),
    "not JSON": ("{", "not JSON"),
    "not UTF-8": ('{"devices": "\udcff"}', "not JSON"),
    "too deep": ("[" * 100_000, "not JSON"),
    "a list": ([1], "not a JSON object"),
    "no devices": ({"delay_ms": [], "bandwidth_gbps": []}, "devices is missing"),
    "no devices at all": (values(devices=0), "devices is 0"),
    "a boolean count": (values(devices=True), "devices is true"),
    "a huge count": (values(devices=MAX_DEVICES + 1), "devices is"),
    "a text count": (values(devices="2"), 'devices is "2"'),
    "rows missing": (values(delay_ms=[[0, 1]]), "delay_ms has 1 entries"),
    "not square": (values(bandwidth_gbps=[[0, 1], [1]]), r"bandwidth_gbps\[1\] has 1 entries"),
    "no matrix": (values(delay_ms=[0, 1]), r"delay_ms\[0\] is 0"),
    "negative delay": (values(delay_ms=[[0, -1], [1, 0]]), r"delay_ms\[0\]\[1\] is -1"),
    "NaN": (values(delay_ms=[[0, float("nan")], [1, 0]]), r"delay_ms\[0\]\[1\] is nan"),
    "infinite": (values(bandwidth_gbps=[[0, float("inf")], [1, 0]]), r"bandwidth_gbps\[0\]\[1\] is inf"),
    "zero bandwidth": (values(bandwidth_gbps=[[0, 1], [0, 0]]), r"bandwidth_gbps\[1\]\[0\] is 0"),
    "boolean": (values(delay_ms=[[0, True], [1, 0]]), r"delay_ms\[0\]\[1\] is true"),
    "null": (values(delay_ms=[[0, None], [1, 0]]), r"delay_ms\[0\]\[1\] is null"),
    "huge": (values(delay_ms=[[0, 10**400], [1, 0]]), r"delay_ms\[0\]\[1\] is 1000"),
    "regions of others": (values(region=["a"]), "region has 1 entries"),
    "region a number": (values(region=[1, "a"]), r"region\[0\] is 1"),
    "region with escapes": (values(region=["\x1b[2J", "a"]), r"region\[0\] is"),
    "no memory": (values(memory_gb=[0, 1]), r"memory_gb\[0\] is 0"),
    "name": (values(name=["x"]), "name is"),
}


@pytest.mark.parametrize("content, message", BAD.values(), ids=BAD)
def test_refused_with_file_and_place(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "home.json"
    text = content if isinstance(content, str) else json.dumps(content)
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=f"home.json: {message}"):
        Scenario.load(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json: cannot be read: No such file"):
        Scenario.load(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        Scenario.load(tmp_path)
