"""Who may lead a training: in a private swarm the trainers among its members; volunteers lead where no trainer's node is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from swarmnode.codec.messages import Error
from swarmnode.codec.training_messages import Lead, Status, Work
from swarmnode.errors import ErrorCode
from swarmnode.net.interfaces import PeerId
from swarmnode.net.network_config import Gate
from swarmnode.swarm.records.run import encode_run
from tests.net.virtual import in_virtual_time
from tests.peer.training_swarm import TrainingSwarm, until
from tests.training.scene import KEY, RUN, TERM, Scene, in_scene


class TrainersFirst(Gate):
    """The members' gate as far as trainings go."""

    def __init__(self) -> None:
        self.trainers: set[PeerId] = set()

    def may_feed(self, peer: PeerId) -> bool:
        return peer in self.trainers

    def may_lead(self, peer: PeerId, stages: Iterable[PeerId]) -> bool:
        return peer in self.trainers or self.trainers.isdisjoint(stages)


@in_scene
async def test_who_may_not_lead_is_refused_and_changes_nothing(scene: Scene) -> None:
    line = await scene.lead()
    leader = scene.networks[1].peer_id
    scene.stage.may_lead = lambda peer: peer == leader
    answer = await (await scene.talk(1)).ask(Lead(TERM + 1, KEY))
    assert answer == Error(ErrorCode.REFUSED)
    assert scene.stage.following.coordinator == leader and scene.stage.following.term == TERM
    assert isinstance(await line.ask(Lead(TERM, KEY)), Status), "the one in force goes on"


@in_scene
async def test_who_may_not_feed_is_refused(scene: Scene) -> None:
    await scene.lead()
    gate = scene.stage.gate = TrainersFirst()
    gate.trainers.add(scene.networks[1].peer_id)
    offer = Work(encode_run(RUN), 1)
    assert await (await scene.talk(1)).ask(offer) == Error(ErrorCode.REFUSED)
    assert await (await scene.talk(0)).ask(offer) == Error(ErrorCode.ELSEWHERE), "it is heard, and there is no election"


@in_virtual_time
async def test_volunteers_lead_until_a_trainers_node_comes(tmp_path: Path) -> None:
    gate = TrainersFirst()
    async with TrainingSwarm(tmp_path, gate) as swarm:
        elder, younger = await swarm.join(0, 3), await swarm.join(0, 3)
        await until(
            lambda: swarm.coordinator is elder and younger.stage.following.coordinator == elder.peer,
            "the eldest's term",
        )
        trainer = await swarm.join(0, 3)
        gate.trainers.add(trainer.peer)
        await until(lambda: swarm.coordinator is trainer, "the trainer's term")
        for volunteer in (elder, younger):
            await until(lambda v=volunteer: v.stage.following.coordinator == trainer.peer, f"{volunteer} to follow it")
        swarm.kill(trainer)
        await until(
            lambda: swarm.coordinator is elder and younger.stage.following.coordinator == elder.peer,
            "the eldest's again",
        )
