"""Jobs are joined and cut without losing or doubling a position, and no wanted output is lost."""

from __future__ import annotations

import random
from collections import deque

import pytest
from msgspec.structs import replace

from swarmnode.codec.messages import Want
from swarmnode.codec.sampling import Sampling
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.compute.serving.sampler import Sampler
from swarmnode.plan.compression import CodecSchedule
from swarmnode.serving.job import ForwardHidden, Job, Return, Sample, cut, merge, next_job


def job(start: int, count: int, want: Want = Want.NOTHING, **more: object) -> Job:
    """Positions whose payload is their own numbers, one byte each; after `skip` others."""
    skip = int(more.get("skip", 0))  # type: ignore[call-overload]
    part = (TensorInfo(Codec.NONE, DType.INT64, (1, skip + count)), bytes(range(start - skip, start + count)))
    made = Job(1, start, count, (part,), ForwardHidden(CodecSchedule(Codec.NONE)), lambda *_: None, 0.0, want=want)
    return replace(made, **more)  # type: ignore[arg-type]


def positions(one: Job) -> list[int]:
    """As the worker reads them."""
    held = b"".join(bytes(payload) for _, payload in one.parts)
    return list(held[one.skip : one.skip + one.count])


def test_joined_and_cut_in_any_way_every_position_comes_once() -> None:
    chance = random.Random(1)
    for _ in range(200):
        jobs, end = deque[Job](), 0
        while end < 100:
            count = chance.randrange(1, 20)
            jobs.append(job(end, count, chance.choice([Want.NOTHING, Want.NOTHING, Want.LAST])))
            end += count
        wanted = [one.end for one in jobs if one.want == Want.LAST]
        came: list[int] = []
        heard: list[int] = []
        while jobs:
            most = chance.randrange(1, 40)
            one = next_job(jobs, most)
            assert one.count <= most and positions(one) == list(range(one.start, one.end))
            came += positions(one)
            heard += [one.end] * (one.want == Want.LAST)
        assert came == list(range(end)) and heard == wanted


def test_what_is_one_answer_stays_whole() -> None:
    jobs = deque([job(0, 50, Want.ALL)])
    assert next_job(jobs, 16).count == 50 and not jobs


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (job(0, 4), job(5, 4)),  # a gap
        (job(0, 4, Want.LAST), job(4, 4)),
        (job(0, 4), job(4, 4, Want.ALL)),
        (job(0, 4), job(4, 4, reorder=(0,))),
        (job(0, 4), job(4, 4, skip=2)),
        (cut(job(0, 4), 3)[0], job(3, 4)),  # its payload goes on
    ],
)
def test_what_must_not_be_joined(first: Job, second: Job) -> None:
    assert merge(first, second) is None


def test_rows_are_reordered_once_and_the_end_brings_the_output() -> None:
    first, rest = cut(job(0, 10, Want.LAST, reorder=(1, 0)), 4)
    assert rest is not None
    assert (first.reorder, first.want, rest.reorder, rest.want) == ((1, 0), Want.NOTHING, (), Want.LAST)


SAMPLER = Sampler(Sampling(prompt_length=10, max_new_tokens=5), 20)


@pytest.mark.parametrize(("then", "want", "wanted"), [
    (ForwardHidden(CodecSchedule(Codec.NONE)), Want.ALL, 0),
    (Return(), Want.NOTHING, 0), (Return(), Want.LAST, 1), (Return(), Want.ALL, 10),
    (Sample(SAMPLER, first=10), Want.NOTHING, 1),
    (Sample(SAMPLER, first=11), Want.NOTHING, 0),
    (Sample(SAMPLER, first=8), Want.NOTHING, 3),
])  # fmt: skip
def test_how_many_outputs_are_wanted(then: object, want: Want, wanted: int) -> None:
    assert job(0, 10, want, then=then).wanted == wanted
