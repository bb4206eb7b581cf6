"""Who holds a lease sends what the run says, and no more."""

from __future__ import annotations

import msgspec
import pytest

from swarmnode.codec.body import HopSpec
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.codec.training_messages import Forward
from swarmnode.errors import ErrorCode
from swarmnode.swarm.records.run import MAX_ROUTER_SUMS, RECIPE, Recipe, Run
from swarmnode.training.worker.admission import refusal_of, seal_lease

RUN = Run(data=bytes(32), steps=9, batch=8, microbatch=4, sequence=32)
KEY = bytes(range(32))
ROUTE = (HopSpec("here", 0, 3),)


def refused(*values: TensorInfo, run: Run = RUN) -> ErrorCode | None:
    seal = seal_lease(KEY, run.id, 1, 2, 3, 0, ROUTE, "trainer")
    body = Forward(1, 2, 3, 0, ROUTE, 0, values, run.id, "trainer", 0.0, seal)
    return refusal_of(body, "trainer", "here", run, KEY)


def ids(rows: int, tokens: int) -> TensorInfo:
    return TensorInfo(Codec.NONE, DType.INT64, (rows, tokens))


def test_the_runs_samples_and_tokens_are_taken() -> None:
    assert refused(ids(4, 32)) is None
    assert refused(TensorInfo(Codec.NONE, DType.FLOAT32, (4, 32, 64)), ids(4, 32)) is None


@pytest.mark.parametrize(
    "values", [(), (ids(1 << 14, 32),), (ids(4, 1 << 14),), (ids(4, 33),), (ids(4, 32), ids(5, 32))]
)
def test_more_or_other_ones_are_refused(values: tuple[TensorInfo, ...]) -> None:
    assert refused(*values) == ErrorCode.MALFORMED


def test_of_modules_the_graph_knows_the_shapes() -> None:
    run = Run(data=bytes(32), steps=9, batch=8, microbatch=4)
    assert refused(TensorInfo(Codec.NONE, DType.FLOAT32, (7, 3)), run=run) is None


def test_sums_of_routers_end_the_values_of_runs_that_have_them() -> None:
    hidden = TensorInfo(Codec.NONE, DType.FLOAT32, (4, 32, 64))
    balanced = msgspec.structs.replace(RUN, schedule=RECIPE, recipe=Recipe(router_balance=0.1))
    for length, run, code in (
        (MAX_ROUTER_SUMS, balanced, None),
        (MAX_ROUTER_SUMS + 1, balanced, ErrorCode.MALFORMED),
        (18, RUN, ErrorCode.MALFORMED),
    ):
        assert refused(hidden, TensorInfo(Codec.NONE, DType.FLOAT32, (length,)), run=run) == code
    assert refused(TensorInfo(Codec.NONE, DType.FLOAT32, (18,)), run=balanced) == ErrorCode.MALFORMED


def test_behind_the_last_step_there_are_held_out_data_alone() -> None:
    run = msgspec.structs.replace(RUN, steps=3, schedule=RECIPE, recipe=Recipe(evaluate_every=9, evaluation=1))
    assert refused(ids(4, 32), run=run) == ErrorCode.MALFORMED
    assert refused(ids(4, 32), run=msgspec.structs.replace(run, steps=4)) is None
