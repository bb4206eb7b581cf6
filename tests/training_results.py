"""What a training swarm's results are held to, on real processes and in virtual time alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest
import torch
from safetensors.torch import load_file


class KeepsStates(Protocol):
    """A swarm whose nodes keep the state of the last step, by block."""

    def last_states(self, name: str) -> Mapping[str, Path]: ...


def assert_same_curve(losses: Mapping[int, float], alone: Mapping[int, float], *, steps: int) -> None:
    """Every step was done, with the loss of one process."""
    assert sorted(losses) == list(range(steps))
    for step, loss in alone.items():
        assert losses[step] == pytest.approx(loss, rel=1e-3), f"step {step}"


def assert_same_parameters(school: KeepsStates, names: Sequence[str], *, spans: int) -> None:
    """Of the nodes that hold the same block, at the last step."""
    seen: dict[str, dict[str, torch.Tensor]] = {}
    compared = 0
    for name in names:
        for block, path in school.last_states(name).items():
            tensors = load_file(path)
            for key, other in seen.setdefault(block, tensors).items():
                assert float((tensors[key].double() - other.double()).abs().max()) <= 1e-5, (name, block, key)
                compared += other is not tensors[key]
    assert compared or len(names) == spans
