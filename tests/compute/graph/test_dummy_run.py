"""Dummy runs of a module's units."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from swarmnode.compute.graph.graph_segment import load_segment
from swarmnode.compute.graph.serialise import read_graph
from swarmnode.compute.training.learner import Learner
from swarmnode.training.worker.training_parts import dummy_run_s
from tests.compute.training.conftest import make_run
from tests.compute.training.test_dummy_run import clock


def test_each_unit_of_a_module_can_be_tried_alone_and_statistics_stay(folder: Callable[[str], Path]) -> None:
    units = read_graph(folder("resnet")).units
    segment = load_segment(folder("resnet"), 0, units)
    before = {name: tensor.clone() for named in segment.buffers().values() for name, tensor in named.items()}
    learner = Learner(segment, make_run(microbatch=2, batch=4, sequence=0))
    assert before
    for unit in range(units):
        assert dummy_run_s(learner, unit, unit + 1, clock(1.0)) == 1.0
    after = {name: tensor for named in segment.buffers().values() for name, tensor in named.items()}
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
