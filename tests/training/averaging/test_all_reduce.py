"""All-reduce between replicas: any length through small windows, near the wire's speed; and who is to blame when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Error
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.codec.training_messages import Failed, How, Part, Pull, Waiting
from swarmnode.compute.training.averaging.parts import LARGEST_PART
from swarmnode.errors import ErrorCode, PeerLost, ProtocolError
from swarmnode.links.switchboard import Channel
from swarmnode.net.memory.medium import Path
from swarmnode.plan.training.averaging import part_shares
from swarmnode.swarm.records.run import Averaging
from swarmnode.training.averaging.all_reduce import Agreed
from swarmnode.training.averaging.attempt import STILL
from swarmnode.training.averaging.partner import MAX_EARLY
from tests.net.virtual import in_virtual_time
from tests.training.averaging.replicas import RUN_ID, Replica, group_of, replicas, within

LONG = 40 * LARGEST_PART + 77  # many windows
SHORT = 4 * LARGEST_PART


def sums(results: list[Agreed | BaseException]) -> list[torch.Tensor]:
    assert all(isinstance(result, Agreed) for result in results), results
    return [result.sums[(0,)] for result in results if isinstance(result, Agreed)]


@in_virtual_time
async def test_a_vector_of_many_windows_is_summed() -> None:
    """It stood still for ever once more came early than was kept."""
    _, members = await replicas(2, LONG)
    wanted_N = sum(member.learner.gradient([0]).copy() for member in members)
    for total_N in sums(await within(60, [member.reduce([group_of(members)]) for member in members])):
        assert torch.equal(total_N, wanted_N)


@in_virtual_time
async def test_contributions_that_are_not_taken_hold_up_no_sums() -> None:
    """In one window for both, either side's contributions could use up the other's, and then both waited for sums."""
    _, (honest, other) = await replicas(2, LONG)
    stranger = Stranger(other, lambda channel, _pull: channel.send(part(), payload=[PAYLOAD]))
    reducing = honest.reduce([group_of([honest, other])])
    channel = await other.board.call(honest.peer, lambda _frame, body: stranger.heard.append(body), lambda _error: None)
    channel.send(Pull(1, 0, 0, RUN_ID, 2, 2))
    await asyncio.sleep(1)
    parts = [(body.part, body.agreed) for body in stranger.heard if isinstance(body, Part)]
    assert len(parts) == 3 and sorted(agreed for _, agreed in parts) == [False, False, True]
    reducing.cancel()


@in_virtual_time
async def test_computing_may_be_slower_than_the_wire() -> None:
    _, members = await replicas(3, LONG)
    for member in members:
        member.executor.call_s = 0.02
    sums(await within(60, [member.reduce([group_of(members)]) for member in members]))


@in_virtual_time
async def test_three_contributors_and_a_listener_end_with_the_same_numbers() -> None:
    _, (listener, *members) = await replicas(4, LONG // 8)
    group = group_of(members, listening=[listener])
    tasks = [member.reduce([group], listening=member is listener) for member in (*members, listener)]
    first_N, *others = sums(await within(60, tasks))
    torch.testing.assert_close(first_N, sum(member.learner.gradient([0]).copy() for member in members))
    assert all(torch.equal(first_N, other_N) for other_N in others)


@in_virtual_time
async def test_it_takes_little_longer_than_the_wire() -> None:
    """Two of 40 MiB: each sends half of its own and half of the sums."""
    _, members = await replicas(2, LONG, path=Path(latency_s=0.03, bytes_per_s=12.5e6))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await within(60, [member.reduce([group_of(members)]) for member in members])
    assert loop.time() - began_s < 1.2 * 4 * LONG / 12.5e6


async def seconds_of(members: list[Replica], shares: dict[str, int]) -> float:
    """How long an all-reduce takes; all end with the same numbers, those of the plain sum up to rounding."""
    began_s = asyncio.get_running_loop().time()
    group = group_of(members, shares=shares)
    first_N, *others = sums(await within(60, [member.reduce([group]) for member in members]))
    took_s = asyncio.get_running_loop().time() - began_s
    assert all(torch.equal(first_N, other_N) for other_N in others)
    torch.testing.assert_close(first_N, sum(member.learner.gradient([0]).copy() for member in members))
    return took_s


@pytest.mark.parametrize("averaging", [Averaging(), Averaging(robust=True)])
@in_virtual_time
async def test_a_member_with_a_slow_line_that_adds_up_less_holds_up_less(averaging: Averaging) -> None:
    """Of six one has a tenth of the others' uplink, shared by its five paths: it adds up a sixth of 1.5 MiB, or a tenth of that."""
    took_s, usual, narrow = [], Path(latency_s=0.01, bytes_per_s=2.5e6), Path(latency_s=0.01, bytes_per_s=0.25e6)
    for sized in (False, True):
        world, (slow, *others) = await replicas(6, 3 * LARGEST_PART // 2, averaging=averaging, path=usual)
        for other in others:
            world.set_path(slow.peer, other.peer, narrow, back=usual)
        lines = part_shares([10e6, *[100e6] * 5])
        named = {member.peer: share for member, share in zip([slow, *others], lines, strict=True)}
        took_s.append(await seconds_of([slow, *others], named if sized else {}))
    assert took_s[1] < 0.75 * took_s[0], took_s


@in_virtual_time
async def test_ways_are_averaged_in_the_place_of_our_own() -> None:
    _, members = await replicas(2, LARGEST_PART, averaging=Averaging(every=5))
    for number, member in enumerate(members):
        with torch.no_grad():
            member.learner.segment.parameters()[0]["weight"].fill_(float(number))
    group = group_of(members)
    groups = [type(group)(group.number, group.blocks, group.members, How.AVERAGE)]
    for result in await within(60, [member.reduce(groups) for member in members]):
        assert isinstance(result, Agreed)
        assert torch.equal(result.pseudo_gradients[(0,)], torch.full((LARGEST_PART,), -0.5))


# -- who is to blame


@in_virtual_time
@pytest.mark.parametrize("calls", [1, 4, 30])
async def test_one_that_computes_no_more_is_named_by_all_though_its_links_answer(calls: int) -> None:
    _, members = await replicas(4, LONG)
    members[1].executor.stalls_after = calls
    tasks = [member.reduce([group_of(members)]) for member in members]
    for result in await within(
        2 * STILL.ceiling_s, [task for task, member in zip(tasks, members, strict=True) if member is not members[1]]
    ):
        assert isinstance(result, PeerLost) and result.peer == members[1].peer
    tasks[1].cancel()


@in_virtual_time
async def test_who_waits_for_one_that_waits_blames_the_last_in_the_chain() -> None:
    """The first two are a group, and so are the last two: the third hears of the first only through the second."""
    _, (first, second, third) = await replicas(3, LONG, units=2)
    groups = [group_of([first, second]), group_of([second, third], number=1, unit=1)]
    first.executor.stalls_after = 6
    tasks = [member.reduce(groups) for member in (first, second, third)]
    for result in await within(STILL.ceiling_s, tasks[1:]):
        assert isinstance(result, PeerLost) and result.peer == first.peer
    tasks[0].cancel()


@in_virtual_time
async def test_one_that_dies_or_hangs_is_named_at_once() -> None:
    for fault in ("kill", "hang"):
        world, members = await replicas(3, LONG)
        tasks = [member.reduce([group_of(members)]) for member in members]
        await asyncio.sleep(0.3)
        getattr(world, fault)(members[2].peer)
        for result in await within(STILL.floor_s, tasks[:2]):
            assert isinstance(result, PeerLost) and result.peer == members[2].peer
        tasks[2].cancel()


@in_virtual_time
async def test_after_a_failure_the_rest_agree_without_the_lost_one() -> None:
    world, members = await replicas(3, LONG)
    tasks = [member.reduce([group_of(members)]) for member in members]
    await asyncio.sleep(0.3)
    world.kill(members[2].peer)
    await within(10, tasks[:2])
    again = [member.reduce([group_of(members[:2])], attempt=1) for member in members[:2]]
    wanted_N = sum(member.learner.gradient([0]).copy() for member in members[:2])
    for total_N in sums(await within(10, again)):
        assert torch.equal(total_N, wanted_N)
    tasks[2].cancel()


@in_virtual_time
async def test_a_slow_one_is_not_lost() -> None:
    """Its uplink carries a part in four seconds."""
    world, members = await replicas(3, 8 * LARGEST_PART)
    for other in members[1:]:
        world.set_path(members[0].peer, other.peer, Path(latency_s=0.05, bytes_per_s=LARGEST_PART))
    sums(await within(600, [member.reduce([group_of(members)]) for member in members]))


@in_virtual_time
async def test_nan_of_one_is_told_as_its_own_and_never_sent() -> None:
    _, members = await replicas(2, LARGEST_PART)
    members[0].learner.gradient([0]).write(slice(5, 6), torch.tensor([float("nan")]))
    own, others = await within(20, [member.reduce([group_of(members)]) for member in members])
    assert getattr(own, "unit", None) == 0
    assert isinstance(others, PeerLost) and others.peer is None, "nobody is to blame but the gradient"


# -- replicas that break the rules


class Stranger:
    """Answers the pulls of a replica in whatever way a test likes."""

    def __init__(self, replica: Replica, answer: Callable[[Channel, Pull], None]) -> None:
        self.replica = replica
        self.heard: list[Body] = []
        self._answer = answer
        self._pulled = False
        replica.board._accept = self._accept

    def _accept(self, channel: Channel, _frame: Frame, body: Body) -> None:
        channel.on_frame = lambda _frame, body: self.heard.append(body)
        assert isinstance(body, Pull)
        self._answer(channel, body)


def part(number: int = 0, elements: int = LARGEST_PART, **changes: object) -> Part:
    fields = {"group": 0, "round": 0, "part": number, "agreed": False, "run": RUN_ID, **changes}
    return Part(**fields, values=(TensorInfo(Codec.NONE, DType.FLOAT32, (elements,)),))  # type: ignore[arg-type]


PAYLOAD = bytes(4 * LARGEST_PART)


def says(head: Part, payload: bytes = PAYLOAD) -> Callable[[Channel, Pull], None]:
    return lambda channel, _pull: channel.send(head, payload=[payload])


def twice(channel: Channel, _pull: Pull) -> None:
    for _ in range(2):
        channel.send(part(), payload=[PAYLOAD])


WRONG: dict[str, Callable[[Channel, Pull], None]] = {
    "a part twice": twice,
    "another part": says(part(3)),
    "another group": says(part(group=2)),
    "another round": says(part(round=1)),
    "another run": says(part(run=bytes(32))),
    "another run waits": lambda channel, _pull: channel.send(Waiting(bytes(32))),
    "a wrong length": says(part(elements=64), bytes(256)),
    "a payload that does not fit": says(part(), bytes(64)),
    "a huge payload": says(part(), bytes(16 << 20)),
    "no vector": lambda channel, _pull: channel.send(Part(0, 0, 0, False, (), RUN_ID)),
    "NaN": says(part(), b"\xff" * (4 * LARGEST_PART)),
    "something else": lambda channel, pull: channel.send(pull),
}


@in_virtual_time
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
async def test_one_that_breaks_the_rules_is_named_and_nothing_else_of_its_link_is_disturbed(
    wrong: Callable[[Channel, Pull], None],
) -> None:
    _, (honest, liar) = await replicas(2, SHORT)
    Stranger(liar, wrong)
    other = await honest.board.call(liar.peer, lambda _frame, _body: None, lambda _error: None)
    other.send(Pull(9, 9, 9, RUN_ID, 1, 1))
    (result,) = await within(20, [honest.reduce([group_of([honest, liar])])])
    assert isinstance(result, ProtocolError) and result.peer == liar.peer
    assert other.open


@in_virtual_time
async def test_who_sends_more_than_was_granted_is_stopped() -> None:
    _, (honest, *others) = await replicas(3, SHORT)

    def flood(channel: Channel, pull: Pull) -> None:
        for number in range(pull.contributions + 1):
            channel.send(part(number), payload=[PAYLOAD])

    liar = Stranger(others[1], flood)
    Stranger(others[0], lambda _channel, _pull: None)
    (result,) = await within(5, [honest.reduce([group_of([honest, *others])])])
    assert isinstance(result, ProtocolError) and result.peer == others[1].peer
    await asyncio.sleep(1)
    assert [body.code for body in liar.heard if isinstance(body, Error)] == [ErrorCode.MALFORMED]


@in_virtual_time
async def test_what_is_pulled_is_answered_to_members_of_the_attempt_alone() -> None:
    _, (one, other, stranger) = await replicas(3, LONG)
    heard: list[Body] = []

    async def pull(*attempt: int, run: bytes = RUN_ID) -> None:
        channel = await stranger.board.call(one.peer, lambda _frame, body: heard.append(body), lambda _error: None)
        channel.send(Pull(*attempt, run, 4, 4))

    await pull(1, 0, 0)  # early: kept until it is known who the members are
    await asyncio.sleep(1)
    reducing = [member.reduce([group_of([one, other])]) for member in (one, other)]
    await asyncio.sleep(0.1)
    await pull(1, 0, 0)
    await pull(1, 0, 0, run=bytes(32))
    await pull(0, 9, 9)
    sums(await within(20, reducing))
    codes = [body.code for body in heard if isinstance(body, Error)]
    assert codes == [ErrorCode.STALE, ErrorCode.REFUSED, ErrorCode.STALE, ErrorCode.STALE]


@in_virtual_time
async def test_a_pull_for_the_first_step_of_the_next_run_is_early_and_not_late() -> None:
    """Attempts were ordered by their steps, so that replicas refused each other until two REDUCEs came at the same moment."""
    _, members = await replicas(2, LONG)
    groups = [group_of(members)]
    sums(await within(20, [member.reduce(groups, attempt=40, step=40) for member in members]))
    first = members[0].reduce(groups, attempt=41)
    await asyncio.sleep(1)
    sums(await within(20, [first, members[1].reduce(groups, attempt=41)]))


@in_virtual_time
async def test_early_pulls_are_few_and_the_oldest_go() -> None:
    _, (target, *strangers) = await replicas(MAX_EARLY // 16 + 2, 64)
    heard: list[Body] = []
    for stranger in strangers:
        for attempt in range(16):
            channel = await stranger.board.call(
                target.peer, lambda _frame, body: heard.append(body), lambda _error: None
            )
            channel.send(Pull(1, 0, attempt, RUN_ID, 1, 1))
    await asyncio.sleep(1)
    assert len(target.all_reducer._early) == len(strangers), "one of each"
    assert all(isinstance(body, Error) and body.code == ErrorCode.STALE for body in heard)


@in_virtual_time
async def test_who_only_excuses_itself_is_not_waited_for_for_ever() -> None:
    _, (honest, idle) = await replicas(2, SHORT)

    def excuse(channel: Channel, _pull: Pull) -> None:
        def again() -> None:
            if channel.open:
                channel.send(Waiting(RUN_ID))
                asyncio.get_running_loop().call_later(1, again)

        again()

    Stranger(idle, excuse)
    (result,) = await within(7 * 2 * STILL.ceiling_s, [honest.reduce([group_of([honest, idle])])])
    assert isinstance(result, PeerLost) and result.peer == idle.peer


@in_virtual_time
async def test_who_gives_up_says_whom_it_lost() -> None:
    _, (honest, other) = await replicas(2, SHORT)
    Stranger(other, lambda channel, _pull: channel.close(Failed(0, "somebody", ErrorCode.PEER_LOST, run=RUN_ID)))
    (result,) = await within(5, [honest.reduce([group_of([honest, other])])])
    assert isinstance(result, PeerLost) and result.peer == "somebody"
