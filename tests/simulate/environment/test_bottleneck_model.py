"""A model with a bottleneck as the planner and the simulator see it."""

from __future__ import annotations

from pathlib import Path

from swarmnode.compute.capacity.capacity import training_sizes
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.model import Model
from swarmnode.terminal.plan_view import describe_span
from tests.compute.training.test_bottleneck import RANK, found


def test_sizes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    found(tmp_path, "llama", stage_layers=2)
    model = Model.load(tmp_path / "weights")
    assert model.training_sizes == training_sizes(Checkpoint(tmp_path / "weights"))
    assert model.crossing(1, 3, 5) == (3, 5, RANK + 1)  # and the token's digit
    assert (model.units, model.matrix_width) == (2, 32)
    whole, first = describe_span(model, Span(0, 2)), describe_span(model, Span(0, 1))
    assert (whole, first) == ("embedding, layers 0-2, head", "embedding, layers 0-1")
