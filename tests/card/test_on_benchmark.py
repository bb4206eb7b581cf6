"""Each part of contrib/benchmarks/gpu.py runs to its end, with small shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.contrib.script import CONTRIB, load

gpu: Any = load(CONTRIB / "benchmarks" / "gpu.py")


def told_of(part: str, card: torch.device) -> Any:
    (told,) = gpu.measure([part], str(card), tiny=True, figure_s=0)
    return json.loads(json.dumps(told))


@pytest.mark.parametrize("part", gpu.PARTS)
def test_a_part_finds_something(part: str, card: torch.device) -> None:
    told = told_of(part, card)
    assert told["found"] and told["device"]


def test_text_is_the_same_in_float32(card: torch.device) -> None:
    found = told_of("text", card)["found"]["torch.float32"]
    assert found == {"in a batch": None, "replayed": None}


def test_payloads_are_the_cpus(card: torch.device) -> None:
    assert all(codec["same"] for codec in told_of("codecs", card)["found"].values())
