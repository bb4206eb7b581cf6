"""Who may lead a training: in a private swarm the trainers among its members, and nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.codec.messages import Body, Error
from swarmnode.codec.training_messages import Conduct, Status, Work
from swarmnode.errors import ErrorCode
from swarmnode.swarm.run import encode_run
from tests.roles.training.scene import RUN, TERM, Scene
from tests.roles.training_swarm import TrainingSwarm, until


@pytest.mark.parametrize("word", [Conduct(TERM + 1), Work(encode_run(RUN), 1)], ids=["conduct", "work"])
async def test_who_may_not_lead_is_refused_and_changes_nothing(scene: Scene, word: Body) -> None:
    line = await scene.conduct()
    leader, follower = (network.peer_id for network in scene.networks[1:])
    scene.stage.may_lead = lambda peer: peer == leader
    answer = await (await scene.talk(1)).ask(word)
    assert answer == Error(ErrorCode.REFUSED)
    assert scene.stage.conductor == leader != follower and scene.stage.term == TERM
    assert isinstance(await line.ask(Conduct(TERM)), Status), "the one in force goes on"


async def test_the_eldest_that_may_lead_conducts(tmp_path: Path) -> None:
    swarm = TrainingSwarm(tmp_path)
    try:
        elder = await swarm.join(0, 3)
        elder.stage.may_lead = lambda _peer: False
        younger = await swarm.join(0, 3)
        for volunteer in (elder, younger):
            volunteer.stage.may_lead = lambda peer: peer == younger.peer
        await until(lambda: swarm.conductor is younger, "the younger one's term")
        await until(lambda: elder.stage.conductor == younger.peer, "the elder one's following")
    finally:
        await swarm.close()
