"""States of units that one node holds are kept on other peers' disks: a run goes on when their last holder is lost for good."""

from __future__ import annotations

import shutil
import typing
from pathlib import Path

import msgspec
import pytest

from swarmnode.client.training.preparation import NO_DATA
from swarmnode.compute.executor import WorkItem
from swarmnode.config import StageConfig
from swarmnode.net.identity import Identity, IdentitySlot
from swarmnode.node.node_config import NodeConfig
from swarmnode.peer.host_config import HostConfig
from swarmnode.plan.offline.planner_files import PlanFile
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import Run
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm
from tests.training_results import assert_same_curve, losses_of_one_process

DATA = Path(typing.__file__)
STEPS, CHECKPOINT_STEPS = 10, 2
SETTINGS = Run(NO_DATA, STEPS, batch=4, microbatch=2, sequence=16, learning_rate=1e-3, checkpoint_steps=2, seed=7)
FRONT, BACK = "0:2", "2:4"


def pass_s(_item: WorkItem) -> float:
    """A step takes seconds, so that there is time to bring states away."""
    return 0.3


class School(VirtualSwarm):
    """A swarm of slow nodes that train."""

    def start(self, name: str, span: str | None = None) -> VirtualMember:
        return self.node(name, span, cost_s=pass_s, compress="none")

    async def open(self, founded: Founded) -> None:
        """The founder's bootstrap peer, and a node for each half of the model."""
        founded.into(self)
        await self.bootstrap()
        for span in (FRONT, BACK):
            await self.start(span, span).wait_for("ready")


@pytest.fixture(scope="module")
def alone(gpt2: Path, training: Founded) -> dict[int, float]:
    """The losses of a single process on the same batches."""
    return losses_of_one_process(training.swarm.manifest, gpt2, DATA, SETTINGS)


@in_virtual_time
async def test_a_run_whose_only_holder_is_lost_for_good_goes_on(
    training: Founded, alone: dict[int, float], tmp_path: Path
) -> None:
    """Its disk is lost, too. A newcomer takes the units that nobody holds, and has their state from the bootstrap peer's disk."""
    async with School(tmp_path) as school:
        await school.open(training)
        trainer = school.trainer("trainer", DATA, SETTINGS)
        await trainer.wait_for_step(3 * CHECKPOINT_STEPS)
        await school.members[BACK].kill()
        shutil.rmtree(school.members[BACK].home)
        newcomer = school.start("newcomer")
        assert await trainer.finish() == STEPS
        assert_same_curve(trainer.losses, alone, steps=STEPS)
        assert newcomer.node.describe()["span"] == [0, 4]


@pytest.mark.parametrize("lost", ["the process", "the disk, too"])
def test_a_run_whose_only_holder_is_lost_before_anything_is_kept_begins_anew(
    training: Founded, gpt2: Path, tmp_path: Path, lost: str
) -> None:
    settings = msgspec.structs.replace(SETTINGS, checkpoint_steps=50)

    losses = dict[int, float]()

    @in_virtual_time
    async def trains() -> None:
        async with School(tmp_path) as school:
            await school.open(training)
            trainer = school.trainer("trainer", DATA, settings)
            await trainer.wait_for_step(3)
            await school.members[BACK].kill()
            if lost != "the process":
                shutil.rmtree(school.members[BACK].home)
            school.start(BACK, BACK)
            assert await trainer.finish() == STEPS
            losses.update(trainer.losses)

    trains()
    assert_same_curve(losses, losses_of_one_process(training.swarm.manifest, gpt2, DATA, settings), steps=STEPS)


@in_virtual_time
async def test_without_a_newcomer_who_is_left_takes_the_units_beside_its_own(
    training: Founded, alone: dict[int, float], tmp_path: Path
) -> None:
    """Each node was the only holder of its units. One is lost for good, disk and all: the run goes on from the last kept step."""
    async with School(tmp_path) as school:
        training.into(school)
        await school.bootstrap()
        homes = {name: tmp_path / "homes" / name for name in ("ada", "bob")}
        peers = [Identity.load_or_create(IdentitySlot(home, "node").path).peer_id for home in homes.values()]
        plan = PlanFile(4, ((Span(0, 2), (0,)), (Span(2, 4), (1,))), (), tuple(peers))
        for name, home in homes.items():
            config = NodeConfig(HostConfig(home, name=name), plan=plan, stage=StageConfig(compress="none"))
            school.node(name, config=config, cost_s=pass_s)
            await school.members[name].wait_for("ready")
        trainer = school.trainer("trainer", DATA, SETTINGS)
        await trainer.wait_for_step(3 * CHECKPOINT_STEPS)
        await school.members["bob"].kill()
        shutil.rmtree(homes["bob"])
        assert await trainer.finish() == STEPS
        assert_same_curve(trainer.losses, alone, steps=STEPS)
        assert school.members["ada"].node.describe()["span"] == [0, 4]


@in_virtual_time
async def test_who_leaves_hands_over_what_it_alone_holds(
    training: Founded, alone: dict[int, float], tmp_path: Path
) -> None:
    """No step is lost then, and none is computed twice."""
    async with School(tmp_path) as school:
        await school.open(training)
        trainer = school.trainer("trainer", DATA, SETTINGS)
        await trainer.wait_for_step(2 * CHECKPOINT_STEPS)
        await school.members[BACK].stop()
        shutil.rmtree(school.members[BACK].home)
        done = max(trainer.losses) + 1
        newcomer = school.start("newcomer")
        assert await trainer.finish() == STEPS
        assert_same_curve(trainer.losses, alone, steps=STEPS)
        first = min(int(path.name.removeprefix("step-")) for path in newcomer.home.glob("training/*/*/step-*"))
        assert first >= done - CHECKPOINT_STEPS
