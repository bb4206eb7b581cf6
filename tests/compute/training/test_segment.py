"""A segment that has what the swarm was founded with again, unit by unit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.lm import SpanSegment, load_segment
from swarmnode.compute.training.segment import refound


@pytest.mark.parametrize(("start", "end"), [(0, None), (1, 3)])
def test_parameters_are_as_they_were_although_they_were_trained(
    checkpoint_path: Path, start: int, end: int | None
) -> None:
    checkpoint = Checkpoint(checkpoint_path)
    end = end or checkpoint.units

    def values(segment: SpanSegment) -> dict[tuple[int, str], torch.Tensor]:
        blocks = segment.parameters().items()
        return {(block, name): tensor.detach() for block, held in blocks for name, tensor in held.items()}

    segment, founding = load_segment(checkpoint, start, end), values(load_segment(checkpoint, start, end))
    trained = values(segment)
    for tensor in trained.values():
        tensor += 1.0
    for unit in range(start, end):
        refound(segment, load_segment(checkpoint, unit, unit + 1))
    assert trained.keys() == founding.keys()
    assert all(torch.equal(trained[key], founding[key]) for key in founding)
