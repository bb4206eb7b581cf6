"""Roll call: how long units are waited for, and which run goes on."""

from __future__ import annotations

from typing import Any, cast

from swarmnode.codec.training_messages import Condition, Status
from swarmnode.swarm.records.run import Run, encode_run
from swarmnode.training.coordinator.coordinator import ANEW_AFTER_S, ROLL_BACK_AFTER_S, Rendezvous, furthest_run
from swarmnode.training.coordinator.worker_group import WorkerHandle

UNITS = 4
RUN, OTHER = (Run(data=bytes(32), steps=steps, batch=8, microbatch=4) for steps in (10, 20))


def member(
    peer: str,
    start: int,
    end: int,
    condition: Condition,
    *,
    step: int = 0,
    run: Run | None = RUN,
    kept: Any = (),
    founded: bool = False,
) -> WorkerHandle:
    """A stage that has said so much."""
    found = WorkerHandle(peer, cast("Any", None), lambda: 0.0)
    raw = b"" if run is None else encode_run(run)
    found.receive(Status(1, condition, start, end, raw, step, (), tuple(kept), founded=founded))
    return found


def test_steps_on_disk_count_once_units_have_been_missing_for_a_while() -> None:
    now_s = [100.0]
    rendezvous = Rendezvous(UNITS, lambda: now_s[0])
    here = member("a", 0, 2, Condition.READY, step=7, kept=[4])
    back = member("b", 2, 4, Condition.BLANK, kept=[4])
    assert rendezvous.find([here, back], RUN) is None and rendezvous.missing == (2, 3)
    now_s[0] += ROLL_BACK_AFTER_S - 0.1
    assert rendezvous.find([here, back], RUN) is None, "one that holds them may only be slow"
    now_s[0] += 0.2
    found = rendezvous.find([here, back], RUN)
    assert found is not None and found.step == 4 and found.restore == {"a", "b"} and not rendezvous.missing


def test_a_first_run_begins_anew_once_units_have_been_missing_for_long() -> None:
    now_s = [100.0]
    rendezvous = Rendezvous(UNITS, lambda: now_s[0])
    stages = [
        member("a", 0, 2, Condition.READY, step=7, founded=True),
        member("b", 2, 4, Condition.BLANK, run=None),
    ]
    assert rendezvous.find(stages, RUN) is None
    now_s[0] += ANEW_AFTER_S - 0.1
    assert rendezvous.find(stages, RUN) is None, "who has them may only be away"
    now_s[0] += 0.2
    found = rendezvous.find(stages, RUN)
    assert found is not None and found.step == 0 and found.anew and found.restore == {"a", "b"}


def test_where_nobody_has_anything_in_memory_the_disk_counts_at_once() -> None:
    stages = [member("a", 0, 2, Condition.BLANK, kept=[4]), member("b", 2, 4, Condition.BLANK, kept=[4])]
    found = Rendezvous(UNITS, lambda: 0.0).find(stages, RUN)
    assert found is not None and found.step == 4


def test_a_run_that_nobody_has_begun_begins_with_what_all_have() -> None:
    stages = [member("a", 0, 2, Condition.BLANK, run=None), member("b", 2, 4, Condition.BLANK, run=None)]
    found = Rendezvous(UNITS, lambda: 0.0).find(stages, RUN)
    assert found is not None and found.step == 0 and found.stay == {"a", "b"}


def test_where_the_only_holder_is_lost_in_the_first_step_who_has_the_founding_parameters_begins_for_it() -> None:
    here, newcomer = member("a", 0, 2, Condition.READY), member("b", 2, 4, Condition.BLANK, run=None)
    found = Rendezvous(UNITS, lambda: 0.0).find([here, newcomer], RUN)
    assert found is not None and found.step == 0 and found.stay == {"a", "b"}


def test_the_first_step_of_a_later_run_needs_who_was_in_the_one_before() -> None:
    here, newcomer = member("a", 0, 2, Condition.READY, kept=[0]), member("b", 2, 4, Condition.BLANK, run=None)
    rendezvous = Rendezvous(UNITS, lambda: 0.0)
    assert rendezvous.find([here, newcomer], RUN) is None and rendezvous.missing == (2, 3)


def test_the_run_that_came_furthest_goes_on() -> None:
    blank, ready = member("a", 0, 4, Condition.BLANK, run=None), member("b", 0, 4, Condition.READY, step=3, run=OTHER)
    disk = member("c", 0, 4, Condition.BLANK, kept=[9])
    assert furthest_run([blank]) is None
    assert furthest_run([blank, disk]) == RUN
    assert furthest_run([blank, disk, ready]) == OTHER, "what is in memory comes before what is on a disk"
