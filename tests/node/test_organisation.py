"""A node that training is faster without stands by, and takes units as soon as they lack a holder."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from swarmnode.net.memory.network import Path as NetworkPath
from swarmnode.plan.view import Span
from swarmnode.swarm.records.manifest import TRAIN
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import TinyModel

FAR = NetworkPath(latency_s=0.3, bytes_per_s=1e5)
ISLANDS = {"ada": 0, "bob": 0, "cyd": 1}


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Founded:
    model = TinyModel.save(tmp_path_factory.mktemp("tiny"))
    return Founded.on(model.folder, tmp_path_factory.mktemp("founded"), mode=TRAIN)


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
        units = Span(*swarm.members["ada"].node.describe()["span"])
        for name in ("ada", "bob"):
            await swarm.members[name].kill()
        told = await far.wait_until(lambda event: event["event"] == "moving" and event["span"][1] > 0, "a move back")
        assert Span(*told["span"]) == units
        await far.wait_until(lambda event: event is far.seen[-1] and event["event"] == "ready", "units again")
