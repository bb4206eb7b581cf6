"""A stage alone: what it does for whom, and what it refuses."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from swarmnode.codec.body import Body
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.messages import End, Error, Fault
from swarmnode.codec.training_messages import (
    Backward,
    Commit,
    Condition,
    Counted,
    Discard,
    Failed,
    Group,
    How,
    Lead,
    MemberSpec,
    Reduce,
    Reduced,
    Release,
    Restore,
    Status,
)
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.errors import ErrorCode, PeerError
from swarmnode.swarm.records.run import Run, encode_run
from swarmnode.training.coordinator.worker_group import CLAIM_S, MAX_TERM_JUMP
from tests.training.scene import KEY, RUN, TERM, Scene, in_scene


def masks(status: Body | PeerError) -> tuple[Counted, ...]:
    assert isinstance(status, Status)
    return status.counted


@in_scene
async def test_a_microbatch_is_counted_and_told(scene: Scene) -> None:
    line = await scene.lead()
    answer = await scene.feed(2)
    assert isinstance(answer, Backward) and answer.present == (False,) and answer.loss > 0
    assert masks(await line.ask(Release((), RUN.id))) == (Counted(0, 3, b"\x04"),)
    assert masks(await line.ask(Discard(RUN.id))) == ()


@in_scene
async def test_whatever_is_computed_says_what_it_is_and_for_whom(scene: Scene) -> None:
    line = await scene.lead()
    await scene.feed(2, lease=7)
    await line.ask(Release((), RUN.id))
    told = ["begin a run for step 0", "forward of 4 for lease 7", f"status for {scene.networks[1].peer_id}"]
    assert [item for item in told if not any(f"<Call {item}, " in computed for computed in scene.computed)] == []


@in_scene
async def test_on_the_way_to_a_step_a_stage_does_not_count_as_without_a_state(scene: Scene) -> None:
    """`Restoration` brought the states of an earlier run in the middle of BEGIN."""
    state, parts, seen = scene.stage.state, scene.stage.parts, []
    begin = parts.begin

    async def watched(run: Run, step: int) -> DeviceLearners:
        seen.append(state.is_stateless)
        return await begin(run, step)

    parts.begin = watched  # type: ignore[method-assign]
    assert state.is_stateless
    line = await scene.lead()
    assert seen == [False] and not state.is_stateless
    status = await line.ask(Restore(encode_run(RUN), 5))
    assert isinstance(status, Status) and status.condition == Condition.BLANK
    assert seen == [False, False] and state.is_stateless, "step 5 is not on the disk"


@in_scene
async def test_the_same_microbatch_is_counted_once(scene: Scene) -> None:
    line = await scene.lead()
    first, second = await scene.feed(2), await scene.feed(2, lease=2)
    assert isinstance(first, Backward) and isinstance(second, Backward) and first.loss == second.loss
    assert masks(await line.ask(Release((), RUN.id))) == (Counted(0, 3, b"\x04"),)


@in_scene
async def test_a_lease_is_computed_once_however_often_it_is_fed(scene: Scene) -> None:
    """Who holds one could have a stage compute all day."""
    line = await scene.lead()
    assert isinstance(await scene.feed(2), Backward)
    computed = len([item for item in scene.computed if "for lease 1" in item])
    for _ in range(3):
        assert await scene.feed(2) == Fault(0, 0, ErrorCode.BUSY)
    await line.ask(Release((), RUN.id))
    assert len([item for item in scene.computed if "for lease 1" in item]) == computed
    assert isinstance(await scene.feed(2, lease=2), Backward), "another lease of the same microbatch"


@in_scene
async def test_a_lease_of_the_next_step_waits_once(scene: Scene) -> None:
    await scene.lead()
    early = asyncio.ensure_future(scene.feed(0, lease=99, step=1))
    await asyncio.sleep(1)
    assert await scene.feed(0, lease=99, step=1) == Fault(0, 0, ErrorCode.BUSY) and not early.done()
    early.cancel()


@in_scene
async def test_a_released_lease_that_comes_late_is_not_counted(scene: Scene) -> None:
    line = await scene.lead()
    assert masks(await line.ask(Release((1,), RUN.id))) == ()
    assert await scene.feed(2, lease=1) == Fault(0, 0, ErrorCode.STALE)
    assert isinstance(await scene.feed(2, lease=2), Backward)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"term": TERM - 1}, ErrorCode.STALE),
        ({"term": TERM + 1}, ErrorCode.STALE),
        ({"step": 2}, ErrorCode.STALE),
        ({"end": 4}, ErrorCode.WRONG_SPAN),
    ],
)
@in_scene
async def test_what_is_not_of_now_and_here_is_refused(scene: Scene, changes: dict[str, int], code: ErrorCode) -> None:
    await scene.lead()
    assert await scene.feed(0, **changes) == Fault(0, 0, code)


@in_scene
async def test_nothing_is_computed_before_a_run_has_begun(scene: Scene) -> None:
    assert await scene.feed(0, term=0) == Fault(0, 0, ErrorCode.STALE)


@in_scene
async def test_values_that_do_not_fit_are_the_senders_fault(scene: Scene) -> None:
    line = await scene.lead()
    body, payload = scene.forward(0)
    (await scene.talk(1)).send(*scene.labels(0))
    answer = await (await scene.talk(1)).ask(body, [bytes(payload[0])[:-4]])
    assert answer == Fault(
        0, 0, ErrorCode.NOT_FINITE
    )  # the code that names the sender, to coordinators of each version
    told = await line.ask(Release((), RUN.id))
    assert isinstance(told, Failed) and told.code == ErrorCode.NOT_FINITE and told.peer, (
        "the coordinator hears the name"
    )
    assert masks(await line.ask(Release((), RUN.id))) == ()


@in_scene
async def test_a_lower_term_is_told_which_one_is_in_force(scene: Scene) -> None:
    line = await scene.lead()
    rival = await scene.talk(1)
    status = await rival.ask(Lead(TERM - 1))
    assert isinstance(status, Status) and status.term == TERM
    assert await rival.ask(Discard(RUN.id)) == Error(ErrorCode.STALE)
    assert isinstance(await line.ask(Release((), RUN.id)), Status), "the first coordinator's word still counts"


@in_scene
async def test_a_higher_term_takes_over_and_finds_what_is_counted(scene: Scene) -> None:
    line = await scene.lead()
    await scene.feed(3)
    rival = await scene.talk(1)
    status = await rival.ask(Lead(TERM + 1, KEY))
    assert masks(status) == (Counted(0, 3, b"\x08"),)
    assert await line.ask(Discard(RUN.id)) == Error(ErrorCode.STALE)
    assert await scene.feed(4, term=TERM) == Fault(0, 0, ErrorCode.STALE)
    assert isinstance(await scene.feed(4, term=TERM + 1), Backward)


@in_scene
async def test_a_commit_without_an_all_reduce_changes_nothing(scene: Scene) -> None:
    line = await scene.lead()
    await scene.feed(3)
    status = await line.ask(Commit(0, 1.0, RUN.id))
    assert masks(status) == (Counted(0, 3, b"\x08"),)
    assert scene.stage.state.step == 0


@in_scene
async def test_a_microbatch_of_the_next_step_waits_for_the_commit(scene: Scene) -> None:
    line = await scene.lead()
    for number in range(RUN.microbatches):
        assert isinstance(await scene.feed(number, lease=number), Backward)
    early = asyncio.ensure_future(scene.feed(0, lease=99, step=1))
    group = Group(0, (0, 1, 2), (MemberSpec(scene.peer, RUN.microbatches),))
    reduced = await line.ask(Reduce(0, 0, (group,), RUN.id))
    assert isinstance(reduced, Reduced) and len(reduced.squares) == 1
    assert not early.done()
    status = await line.ask(Commit(0, reduced.squares[0] ** 0.5, RUN.id))
    assert isinstance(status, Status) and status.step == 1
    assert isinstance(await early, Backward)


@pytest.mark.parametrize(("count", "how"), [(3, How.SUM), (3, How.AVERAGE), (1, How.SUM)])
@in_scene
async def test_who_counted_less_than_is_believed_says_so_and_contributes_nothing(
    scene: Scene, count: int, how: How
) -> None:
    line = await scene.lead()
    for number in range(count - 1):
        assert isinstance(await scene.feed(number, lease=number), Backward)
    group = Group(0, (0, 1, 2), (MemberSpec(scene.peer, count),), how)
    status = await line.ask(Reduce(0, 7, (group,), RUN.id))
    assert isinstance(status, Status) and status.answers == FrameKind.DISCARD
    assert [counted.mask for counted in masks(status)] == [bytes([(1 << count - 1) - 1])] * (count > 1)
    failed = await line.next()
    assert isinstance(failed, Failed) and (failed.lease, failed.code) == (7, ErrorCode.STALE)
    if count > 1:
        right = Group(0, (0, 1, 2), (MemberSpec(scene.peer, count - 1),))
        assert isinstance(await line.ask(Reduce(0, 8, (right,), RUN.id)), Reduced), "what it has counted is still there"


@pytest.mark.parametrize("how", [How.AVERAGE, How.APART])
@in_scene
async def test_replicas_update_apart_only_in_a_run_of_that_kind(scene: Scene, how: How) -> None:
    line = await scene.lead()
    assert isinstance(await scene.feed(0), Backward)
    group = Group(0, (0, 1, 2), (MemberSpec(scene.peer, 1),), how)
    answer = await line.ask(Reduce(0, 0, (group,), RUN.id))
    assert isinstance(answer, Failed) and answer.code == ErrorCode.MALFORMED
    assert masks(await line.ask(Release((), RUN.id))) == (Counted(0, 3, b"\x01"),), "and the stage is still there"


@in_scene
async def test_a_first_frame_that_begins_nothing(scene: Scene) -> None:
    assert await (await scene.talk()).ask(Release((), RUN.id)) == Error(ErrorCode.MALFORMED)
    assert await (await scene.talk()).ask(End()) == Error(ErrorCode.MALFORMED)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"run": bytes(32)}, ErrorCode.WRONG_RUN),
        ({"number": RUN.microbatches}, ErrorCode.MALFORMED),
        ({"number": 1}, ErrorCode.REFUSED),  # of another microbatch than the lease's
        ({"lease": 9}, ErrorCode.REFUSED),
        ({"seal": bytes(16)}, ErrorCode.REFUSED),
        ({"seal": b""}, ErrorCode.REFUSED),
    ],
)
@in_scene
async def test_a_lease_is_for_what_it_was_given_for(scene: Scene, changes: dict[str, object], code: ErrorCode) -> None:
    line = await scene.lead()
    body, payload = scene.forward(0)
    wrong = msgspec.structs.replace(body, **changes)
    assert await (await scene.talk(1)).ask(wrong, payload) == Fault(0, 0, code)
    assert isinstance(await scene.feed(2), Backward), "who keeps to the rules is served"
    assert masks(await line.ask(Release((), RUN.id))) == (Counted(0, 3, b"\x04"),)


@in_scene
async def test_a_lease_is_taken_from_its_holder_alone(scene: Scene) -> None:
    await scene.lead()
    body, payload = scene.forward(0)
    assert await (await scene.talk(0)).ask(body, payload) == Fault(0, 0, ErrorCode.REFUSED), "overheard"
    own = msgspec.structs.replace(body, feeder=scene.networks[1].peer_id)
    assert await (await scene.talk(0)).ask(own, payload) == Fault(0, 0, ErrorCode.REFUSED), "forged"
    assert isinstance(await scene.feed(0), Backward)


@in_scene
async def test_commands_of_another_run_do_nothing(scene: Scene) -> None:
    line = await scene.lead()
    assert isinstance(await scene.feed(2), Backward)
    assert masks(await line.ask(Discard(bytes(32)))) == (Counted(0, 3, b"\x04"),)
    assert masks(await line.ask(Release((3,), bytes(32)))) == (Counted(0, 3, b"\x04"),)
    assert isinstance(await scene.feed(3, lease=3), Backward), "the lease is not forgotten"
    status = await line.ask(Commit(0, 1.0, bytes(32)))
    assert isinstance(status, Status) and status.step == 0


@in_scene
async def test_an_all_reduce_of_another_run_is_refused(scene: Scene) -> None:
    line = await scene.lead()
    answer = await line.ask(Reduce(0, 3, (), bytes(32)))
    assert (
        isinstance(answer, Failed)
        and answer.lease == 3
        and answer.code == ErrorCode.WRONG_RUN
        and answer.run == bytes(32)
    )


@in_scene
async def test_a_term_out_of_all_reason_is_not_followed(scene: Scene) -> None:
    """Else one peer could use up all that there are."""
    line = await scene.lead()
    status = await (await scene.talk(1)).ask(Lead(TERM + MAX_TERM_JUMP + 1, KEY))
    assert isinstance(status, Status) and status.term == TERM
    assert isinstance(await line.ask(Release((), RUN.id)), Status), "the one in force goes on"


@in_scene
async def test_a_speed_is_told_once_when_it_is_another(scene: Scene) -> None:
    state, (part,) = scene.stage.state, scene.stage.parts
    has_new_speed = type(state).has_new_speed
    assert not has_new_speed(state), "nothing was timed"
    await (await scene.lead()).ask(Release((), RUN.id))
    part.unit_time.begin(1.0)
    assert has_new_speed(state) and not has_new_speed(state), "an estimate"
    for _ in range(2):
        part.unit_time.record(1, 0.55)
    assert not has_new_speed(state), "about as told"
    part.unit_time.begin(9.0)
    assert has_new_speed(state) and not has_new_speed(state)


@in_scene
async def test_claims_to_lead_are_bounded_and_idle_ones_close(scene: Scene) -> None:
    await scene.lead()
    claims = [await scene.talk(1) for _ in range(100)]
    for claim in claims:
        assert isinstance(await claim.ask(Lead(TERM - 1, KEY)), Status)
    held = [incoming.channels for incoming in scene.stage.switchboard._incoming]
    assert sum(map(len, held)) == 2, "the one in force, and the peer's last claim"
    await asyncio.sleep(CLAIM_S + 1)
    assert sum(map(len, held)) == 0, "who says nothing leads no more, either"
