"""A node that training is faster without stands by, and takes units as soon as they lack a holder; one that trains moves where
others were lost."""

from __future__ import annotations

import asyncio
import math
import typing
from collections import Counter
from itertools import combinations, permutations, product
from pathlib import Path

import msgspec
import pytest

from swarmnode.client.training.preparation import NO_DATA
from swarmnode.codec.training_messages import Condition
from swarmnode.compute.capacity.capacity import limit_bytes_for
from swarmnode.net.identity import Identity, IdentitySlot
from swarmnode.net.memory.medium import Path as NetworkPath
from swarmnode.node.node_config import NodeConfig
from swarmnode.peer.host import Host
from swarmnode.peer.host_config import HostConfig
from swarmnode.peer.placement import Placement
from swarmnode.plan.offline.planner_files import PlanFile
from swarmnode.plan.view import Span
from swarmnode.swarm.records.announcement import Place, State, TrainingNews
from swarmnode.swarm.records.manifest import TRAIN
from swarmnode.swarm.records.run import Run
from swarmnode.training.coordinator.coordinator import OTHERS_S
from swarmnode.training.organisation import step_load_of
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm, VirtualTrainer
from tests.tiny import TinyModel
from tests.training_results import assert_same_curve, losses_of_one_process

FAR = NetworkPath(latency_s=0.3, bytes_per_s=1e5)
ISLANDS = {"ada": 0, "bob": 0, "cyd": 1}
DATA = Path(typing.__file__)
SETTINGS = Run(NO_DATA, 12, batch=4, microbatch=2, sequence=16, learning_rate=1e-3, checkpoint_steps=4, seed=7)
PASS_S = 0.3
PATIENCE_S = 10.0  # for what is done at once
CRAWL = NetworkPath(latency_s=0.01, bytes_per_s=5e3)
INSIDE, BETWEEN = NetworkPath(0.001, 12.5e6), NetworkPath(0.05, 2e5)  # of two clusters
STEADY_S = 60.0  # in which a node would move, if it were to
HALF_BYTES = limit_bytes_for(450_000)  # of the four units


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Founded:
    model = TinyModel.save(tmp_path_factory.mktemp("tiny"))
    return Founded.on(model.folder, tmp_path_factory.mktemp("founded"), mode=TRAIN)


@pytest.fixture(scope="module")
def alone(gpt2: Path, training: Founded) -> dict[int, float]:
    """The losses of a single process on the same batches."""
    return losses_of_one_process(training.swarm.manifest, gpt2, DATA, SETTINGS)


def span_of(member: VirtualMember) -> Span:
    """What it holds now."""
    return Span(*member.node.describe()["span"])


async def go_on(trainer: VirtualTrainer, peers: int) -> None:
    """Another step is done, by so many peers, and then no more."""
    settled = max(trainer.losses)
    await trainer.wait_until(lambda: max(trainer.losses) > settled and trainer.peers[max(trainer.losses)] == peers)
    await trainer.kill()


def assert_curve_of_one_process(training: Founded, gpt2: Path, endless: Run, trainer: VirtualTrainer) -> None:
    """As far as it came."""
    done = msgspec.structs.replace(endless, steps=len(trainer.losses))
    alone = losses_of_one_process(training.swarm.manifest, gpt2, DATA, done)
    assert_same_curve(trainer.losses, alone, steps=done.steps)


@in_virtual_time
async def test_who_only_holds_others_up_stands_by_until_it_is_needed(founded: Founded, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        for name in ISLANDS:
            swarm.node(name)
        for member in swarm.members.values():
            await member.wait_for("joined")
        for (one, here), (other, there) in combinations(ISLANDS.items(), 2):
            if here != there:
                swarm.world.set_path(swarm.members[one].peer, swarm.members[other].peer, FAR)
        far = swarm.members["cyd"]
        await far.wait_for("spare")
        assert far.node.describe()["span"] == [0, 0]
        units = span_of(swarm.members["ada"])
        for name in ("ada", "bob"):
            await swarm.members[name].kill()
        told = await far.wait_until(lambda event: event["event"] == "moving" and event["span"][1] > 0, "a move back")
        assert Span(*told["span"]) == units
        await far.wait_until(lambda event: event is far.seen[-1] and event["event"] == "ready", "units again")


@in_virtual_time
async def test_of_two_clusters_joined_by_a_slow_link_each_holds_the_whole_model(
    training: Founded, tmp_path: Path
) -> None:
    """Who comes first takes the first half, so that at first all that is trained would cross the slow link."""
    async with VirtualSwarm(tmp_path) as swarm:
        training.into(swarm)
        await swarm.bootstrap()
        members = [swarm.node(f"node-{number}", memory_bytes=HALF_BYTES) for number in range(4)]
        for member in members:
            await member.wait_for("joined")
        for (one, here), (other, there) in combinations(enumerate(members), 2):
            swarm.world.set_path(here.peer, there.peer, INSIDE if one // 2 == other // 2 else BETWEEN)
        await asyncio.sleep(STEADY_S)
        spans = [span_of(member) for member in members]
        assert {*spans[:2]} == {*spans[2:]} == {Span(0, 2), Span(2, 4)}


@in_virtual_time
async def test_a_planned_node_stays_until_one_of_the_plan_has_gone(founded: Founded, tmp_path: Path) -> None:
    """Each could hold the whole model, and would, if nobody had planned."""
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        units = swarm.load().manifest.model.units  # type: ignore[union-attr]
        halves = {"ada": Span(0, units // 2), "bob": Span(units // 2, units)}
        homes = {name: tmp_path / "homes" / name for name in halves}
        peers = [Identity.load_or_create(IdentitySlot(home, "node").path).peer_id for home in homes.values()]
        plan = PlanFile(
            units, tuple((span, (number,)) for number, span in enumerate(halves.values())), (), tuple(peers)
        )
        for name, home in homes.items():
            swarm.node(name, config=NodeConfig(HostConfig(home, name=name), plan=plan))
            await swarm.members[name].wait_for("ready")
            await asyncio.sleep(STEADY_S)
        spans = {name: span_of(member) for name, member in swarm.members.items()}
        assert spans == halves
        assert not any(told["event"] == "moving" for member in swarm.members.values() for told in member.seen)
        await swarm.members["bob"].kill()
        told = await swarm.members["ada"].wait_for("moving")
        assert Span(*told["span"]) == Span(0, units)


@in_virtual_time
async def test_who_trains_moves_where_others_were_lost_and_nothing_is_lost_with_it(
    training: Founded, gpt2: Path, tmp_path: Path
) -> None:
    """Three nodes hold one half, two the other. Of these one is lost: one of the three goes there, and learns from the other."""
    endless = msgspec.structs.replace(SETTINGS, steps=400, schedule="constant")
    async with VirtualSwarm(tmp_path) as swarm:
        training.into(swarm)
        await swarm.bootstrap()
        for number in range(5):
            swarm.node(f"node-{number}", cost_s=lambda _item: PASS_S, compress="none", memory_bytes=HALF_BYTES)
        for member in swarm.members.values():
            await member.wait_for("ready")
        trainer = swarm.trainer("trainer", DATA, endless)
        await trainer.wait_for_step(2)
        spans = {name: span_of(member) for name, member in swarm.members.items()}
        (many, three), (few, two) = Counter(spans.values()).most_common()
        assert {many, few} == {Span(0, 2), Span(2, 4)} and (three, two) == (3, 2)
        host = swarm.members["node-0"].node._host
        assert host is not None and host.swarm.manifest is not None
        told = {tuple(peer.step_load) for peer in host.directory.peers().values() if peer.training_step}
        assert told == {step_load_of(endless, host.swarm.manifest.model.hidden)}, "what a step asks is known to all"
        await swarm.members.pop(next(name for name, span in spans.items() if span == few)).kill()
        evenly = {many: 2, few: 2}
        await trainer.wait_until(lambda: Counter(map(span_of, swarm.members.values())) == evenly)
        await go_on(trainer, len(swarm.members))
    assert_curve_of_one_process(training, gpt2, endless, trainer)


@in_virtual_time
async def test_who_trains_comes_to_another_layout_when_links_change_and_nothing_is_lost_with_it(
    training: Founded, gpt2: Path, tmp_path: Path
) -> None:
    """Of four nodes two hold one half, and two the other. Then one and one are joined with the others by a slow link alone, which
    gradients would cross, of which a step of this run has most: two change over, and learn from those that they go to."""
    endless = msgspec.structs.replace(SETTINGS, steps=400, schedule="constant")
    async with VirtualSwarm(tmp_path) as swarm:
        training.into(swarm)
        await swarm.bootstrap()
        members = [
            swarm.node(f"node-{number}", cost_s=lambda _item: PASS_S, compress="none", memory_bytes=HALF_BYTES)
            for number in range(4)
        ]
        for member in members:
            await member.wait_for("ready")
        trainer = swarm.trainer("trainer", DATA, endless)
        await trainer.wait_for_step(2)
        members.sort(key=span_of)
        assert [span_of(member) for member in members] == [Span(0, 2), Span(0, 2), Span(2, 4), Span(2, 4)]
        places = members[::2], members[1::2]
        for here, there in product(*places):
            swarm.world.set_path(here.peer, there.peer, BETWEEN)
        halves = [{Span(0, 2)}, {Span(2, 4)}]
        await trainer.wait_until(lambda: [{*map(span_of, place)} for place in places] in (halves, halves[::-1]))
        suspicions = [
            member.node._host.directory.why_suspected(other.peer)  # type: ignore[union-attr]
            for member, other in permutations(members, 2)
        ]
        blamed = [reason for reason in suspicions if "closed the link" in reason]
        assert not blamed, "who moves leaves its coordinator, which has done nothing"
        await go_on(trainer, len(members))
    assert_curve_of_one_process(training, gpt2, endless, trainer)


@in_virtual_time
async def test_what_the_last_who_had_learnt_left_on_its_disk_is_fetched_by_who_waits_for_it_in_the_run(
    training: Founded, alone: dict[int, float], tmp_path: Path
) -> None:
    """Bob is in the run, and has next to nothing of its state when ada goes to half of the units."""
    async with VirtualSwarm(tmp_path) as swarm:
        training.into(swarm)
        await swarm.bootstrap()

        def start(name: str, span: str) -> VirtualMember:
            return swarm.node(name, span, cost_s=lambda _item: PASS_S, compress="none")

        ada = start("ada", "0:4")
        await ada.wait_for("ready")
        trainer = swarm.trainer("trainer", DATA, SETTINGS)
        await trainer.wait_for_step(0)
        bob = start("bob", "0:4")
        await bob.wait_for("joined")
        swarm.world.set_path(ada.peer, bob.peer, CRAWL)
        await trainer.wait_until(lambda: condition_of(bob) == Condition.LISTENING)
        await trainer.wait_for_step(max(trainer.losses) + 1)
        assert bob.node._host is not None and bob.node._host.directory.own is not None
        assert bob.node._host.directory.own.training_step == 0, "nobody takes it for a holder"
        await ada.stop()
        swarm.world.set_path(ada.peer, bob.peer, INSIDE)
        start("ada", "0:2")
        assert await trainer.finish() == SETTINGS.steps
        assert_same_curve(trainer.losses, alone, steps=SETTINGS.steps)


@pytest.mark.parametrize(("comes_s", "begins_s"), [(20.0, 20.0), (math.inf, OTHERS_S)])
@in_virtual_time
async def test_a_first_step_waits_for_those_who_are_on_their_way_and_not_for_ever(
    training: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_s: float, begins_s: float
) -> None:
    """What it learns would have to be sent to them."""
    async with VirtualSwarm(tmp_path) as swarm:
        training.into(swarm)
        await swarm.bootstrap()
        clock = asyncio.get_running_loop().time
        came_s = math.inf
        monkeypatch.setattr(Placement, "awaits_others", lambda _self: clock() < came_s)
        ada = swarm.node("ada", cost_s=lambda _item: PASS_S, compress="none")
        await ada.wait_for("ready")
        began_s = clock()
        came_s = began_s + comes_s
        trainer = swarm.trainer("trainer", DATA, SETTINGS)
        await trainer.wait_until(lambda: bool(trainer.why))
        assert trainer.why.startswith("step 0 waits: until peers are at the places") and not trainer.missing
        await trainer.wait_for_step(0)
        first_s = clock() - began_s
        assert begins_s < first_s < begins_s + PATIENCE_S
        await trainer.wait_for_step(1)
        assert clock() - began_s - first_s < PATIENCE_S, "only a first step waits"
        await trainer.kill()


@in_virtual_time
async def test_who_leaves_in_the_first_step_keeps_nothing_of_it(training: Founded, tmp_path: Path) -> None:
    """Whoever comes has it, too: a state on a disk would be one that others must fetch."""
    async with VirtualSwarm(tmp_path) as swarm:
        training.into(swarm)
        await swarm.bootstrap()
        ada = swarm.node("ada", "0:4", cost_s=lambda _item: 10.0, compress="none")
        await ada.wait_for("ready")
        trainer = swarm.trainer("trainer", DATA, SETTINGS)
        await trainer.wait_until(lambda: condition_of(ada) == Condition.READY)
        await ada.stop()
        assert not trainer.losses and not list((tmp_path / "homes" / "ada").glob("training/*/*/step-*"))


def condition_of(member: VirtualMember) -> Condition | None:
    """Of its stage in a run; None before it has one."""
    stage = member.node._stage
    return None if stage is None else stage.training.state.condition  # type: ignore[attr-defined]


@in_virtual_time
async def test_who_says_that_it_has_trained_is_no_holder_before_it_has_averaged_with_others(
    training: Founded, tmp_path: Path
) -> None:
    """Else the last holder of a unit would leave it to a peer that made its announcement up."""
    endless = msgspec.structs.replace(SETTINGS, steps=4000, batch=8)
    async with VirtualSwarm(tmp_path) as swarm:
        training.into(swarm)
        await swarm.bootstrap()
        ada = swarm.node("ada", "0:4", cost_s=lambda _item: PASS_S, compress="none")
        await ada.wait_for("ready")
        liar = swarm.node("liar")

        async def lie(host: Host, *_: object) -> None:
            host.directory.announce(Place(state=State.READY, span=(0, 4)), TrainingNews(training_step=7))
            await asyncio.Event().wait()

        liar.node._work = lie  # type: ignore[method-assign]
        await liar.wait_for("joined")
        trainer = swarm.trainer("trainer", DATA, endless)

        assert ada.node._host is not None and ada.node._stage is not None
        directory = ada.node._host.directory
        await trainer.wait_for_step(1)
        while liar.peer not in directory.peers():  # now and then it is suspected: it does not do what it says
            await directory.changed(directory.revision)
        assert directory.peers()[liar.peer].training_step == 7 and ada.node._stage.bound
        bob = swarm.node("bob", "0:4", cost_s=lambda _item: PASS_S, compress="none")
        await bob.wait_for("ready")
        await trainer.wait_until(lambda: ada.node._stage is not None and not ada.node._stage.bound)
        await trainer.kill()
