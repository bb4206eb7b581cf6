"""The test of truth: a swarm of whole nodes, some of which are killed, draws the loss curve of one process."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import typing
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from swarmnode.client.training.preparation import NO_DATA
from swarmnode.node.node_config import NodeConfig
from swarmnode.peer.host_config import HostConfig
from swarmnode.swarm.records.manifest import TRAIN
from swarmnode.swarm.records.run import Run, decode_run
from swarmnode.swarm.storage.state_store import RUN_FILE
from swarmnode.training.worker import training_worker
from swarmnode.training.worker.stage_state import StageState
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm, sees_ready
from tests.training_results import assert_same_curve, assert_same_parameters, losses_of_one_process, save_gpt2

DATA = Path(typing.__file__)
SPANS = ("0:2", "2:4", "4:6")
STEPS = 18
KILL_EVERY = 4
CHECKPOINT_STEPS = 6
SETTINGS = Run(
    data=NO_DATA,
    steps=STEPS,
    batch=12,
    microbatch=4,
    sequence=32,
    learning_rate=2e-3,
    warmup_steps=5,
    checkpoint_steps=CHECKPOINT_STEPS,
    seed=7,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of four layers on bytes, with dropout."""
    folder = tmp_path_factory.mktemp("gpt2")
    save_gpt2(folder, layers=4, heads=4, width=64, positions=32)
    return folder


@pytest.fixture(scope="module")
def founded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Founded:
    return Founded.on(model, tmp_path_factory.mktemp("founded"), mode=TRAIN)


@pytest.fixture(scope="module")
def alone(model: Path, founded: Founded) -> dict[int, float]:
    """The losses of a single process on the same batches."""
    return losses_of_one_process(founded.swarm.manifest, model, DATA, SETTINGS)


class School(VirtualSwarm):
    """A swarm that trains for so many steps, and its nodes by name."""

    steps = STEPS

    def start(self, name: str, span: str) -> VirtualMember:
        return self.node(name, span, compress="none")

    def start_behind(self, upload_bps: float, name: str, span: str) -> VirtualMember:
        """A node with a slow uplink, which compresses as it sees fit."""
        home = self.folder / "homes" / name
        return self.node(name, span, config=NodeConfig(HostConfig(home, name=name, max_upload_bps=upload_bps)))

    def _last_step(self, name: str) -> list[Path]:
        return sorted((self.folder / "homes" / name).glob(f"training/*/*/step-{self.steps:08d}"))

    async def settle(self, names: Sequence[str]) -> None:
        """Wait until each of these nodes has the last step on its disk, those that came late too."""
        for _ in range(200):
            if all(self._last_step(name) for name in names):
                return
            await asyncio.sleep(0.5)
        raise AssertionError([name for name in names if not self._last_step(name)])

    async def stop(self, names: Sequence[str]) -> None:
        """In order, so that each node writes down where it is."""
        for name in names:
            await self.members[name].stop()

    def last_states(self, name: str) -> dict[str, Path]:
        """The files of the last step on a node's disk, by block."""
        return {path.name: path for path in self._last_step(name)[-1].glob("*.safetensors")}

    async def start_all(self, names: Sequence[str]) -> None:
        """Nodes named by their span, and a letter where there are several; waits until all are ready."""
        for name in names:
            self.start(name, name.split("-")[0])
        for name in names:
            await self.members[name].wait_for("ready")


PAIRS = [f"{span}-{replica}" for span in SPANS for replica in ("a", "b")]


@contextlib.asynccontextmanager
async def school_of(founded: Founded, folder: Path) -> AsyncIterator[School]:
    async with School(folder) as school:
        founded.into(school)
        await school.bootstrap()
        yield school


@pytest.mark.parametrize("names", [SPANS, PAIRS], ids=["1", "2"])
@in_virtual_time
async def test_the_curve_of_one_process(
    founded: Founded, alone: dict[int, float], tmp_path: Path, names: Sequence[str]
) -> None:
    async with school_of(founded, tmp_path) as school:
        await school.start_all(names)
        trainer = school.trainer("trainer", DATA, SETTINGS)
        assert await trainer.finish() == STEPS
        assert_same_curve(trainer.losses, alone, steps=STEPS)
        off = [abs(took_s / expected_s - 1) for expected_s, took_s in list(trainer.step_s.values())[4:]]
        assert statistics.median(off) < 0.2, trainer.step_s  # the device's own clock is another one here: it is learnt
        assert alone[STEPS - 1] < 0.85 * alone[0]
        await school.stop(names)
        assert_same_parameters(school, names, spans=len(SPANS))


@in_virtual_time
async def test_replicas_killed_and_others_joining(founded: Founded, alone: dict[int, float], tmp_path: Path) -> None:
    """Every 4 steps one of the replicas is killed, in turn of all spans, and another one comes."""
    async with school_of(founded, tmp_path) as school:
        await school.start_all(PAIRS)
        nodes = list(PAIRS)
        trainer = school.trainer("trainer", DATA, SETTINGS)
        for number, step in enumerate(range(KILL_EVERY, STEPS - 5, KILL_EVERY)):
            await trainer.wait_for_step(step)
            span = SPANS[number % len(SPANS)]
            victim = next(name for name in nodes if name.startswith(span))
            nodes.remove(victim)
            await school.members[victim].kill()
            nodes.append(f"{span}-{step}")
            await school.start(nodes[-1], span).wait_for("ready")
        assert await trainer.finish() == STEPS
        assert_same_curve(trainer.losses, alone, steps=STEPS)
        assert min(trainer.peers.values()) < len(nodes), "replicas were lost"
        await school.settle(nodes)
        await school.stop(nodes)
        assert_same_parameters(school, nodes, spans=len(SPANS))


@in_virtual_time
async def test_a_trainer_killed(founded: Founded, alone: dict[int, float], tmp_path: Path) -> None:
    async with school_of(founded, tmp_path) as school:
        await school.start_all(PAIRS)
        first, second = school.trainer("first", DATA, SETTINGS), school.trainer("second", DATA, SETTINGS)
        await second.wait_for_step(5)
        await first.wait_for_step(12)
        await first.kill()
        assert await second.finish() == STEPS
        assert_same_curve({**first.losses, **second.losses}, alone, steps=STEPS)
        await school.stop(PAIRS)
        assert_same_parameters(school, PAIRS, spans=len(SPANS))


@in_virtual_time
async def test_a_swarm_killed_whole_goes_on_where_it_was(
    founded: Founded, alone: dict[int, float], tmp_path: Path
) -> None:
    async with school_of(founded, tmp_path) as school:
        await school.start_all(SPANS)
        before = school.trainer("before", DATA, SETTINGS)
        await before.wait_for_step(10)
        for member in (*school.members.values(), before):
            await member.kill()
        await school.start_all(SPANS)
        after = school.trainer("after", DATA, SETTINGS)
        assert await after.finish() == STEPS
        assert max(before.losses) - CHECKPOINT_STEPS <= min(after.losses) <= max(before.losses) + 1
        assert_same_curve({**before.losses, **after.losses}, alone, steps=STEPS)
        for step in before.losses.keys() & after.losses.keys():
            assert after.losses[step] == pytest.approx(before.losses[step], rel=1e-5)


@in_virtual_time
async def test_a_swarm_that_starts_again_never_writes_with_the_founders_weights(
    founded: Founded, tmp_path: Path
) -> None:
    """Its nodes are ready before a coordinator has led them back to the last step: texts wait until then."""

    async def write() -> list[int]:
        async with school.client() as client:
            await sees_ready(client, len(SPANS))
            return (await client.generate(list(b"import "), max_new_tokens=20, temperature=1.0, seed=1)).ids

    async with school_of(founded, tmp_path) as school:
        await school.start_all(SPANS)
        as_founded = await write()
        assert await school.trainer("trainer", DATA, SETTINGS).finish() == STEPS
        learnt = await write()
        await school.stop(SPANS)
        await school.start_all(SPANS)
        assert await write() == learnt != as_founded


@in_virtual_time
async def test_a_unit_without_anybody_is_waited_for(founded: Founded, alone: dict[int, float], tmp_path: Path) -> None:
    async with school_of(founded, tmp_path) as school:
        await school.start_all(SPANS)
        trainer = school.trainer("trainer", DATA, SETTINGS)
        await trainer.wait_for_step(8)
        await school.members[SPANS[1]].kill()
        trainer.missing = None
        await trainer.wait_until(lambda: bool(trainer.missing))
        assert trainer.missing == (2, 3)
        lost = school.members[SPANS[1]].peer
        explained = [
            school.members[name].node.why(about)["decisions"]
            for name in SPANS
            if name != SPANS[1]
            for about in ("", lost)
        ]
        told = [one["what"] for decisions in explained for one in decisions if one["topic"] == "training"]
        gone = {f"goes on without {lost[-8:]}", f"does not follow {lost[-8:]} any more"}  # as a stage, or as who led
        assert "leads the training" in told and gone & {*told}
        assert any(one.startswith("follows ") for one in told)
        school.start(SPANS[1], SPANS[1])
        assert await trainer.finish() == STEPS
        assert_same_curve(trainer.losses, alone, steps=STEPS)


@in_virtual_time
async def test_a_slow_uplink_is_compressed_for_and_says_so(
    founded: Founded, alone: dict[int, float], tmp_path: Path
) -> None:
    """Paced to 1 Mbit/s, so that hidden states of 98 kB are slower than computing them; the curve stays close."""
    async with school_of(founded, tmp_path) as school:
        for span in SPANS:
            await school.start_behind(1e6, span, span).wait_for("ready")
        settings = msgspec.structs.replace(SETTINGS, microbatch=12, steps=12)
        trainer = school.trainer("trainer", DATA, settings)
        told = await school.members[SPANS[0]].wait_for("compressing")
        assert told["direction"] == "forward"
        assert told["codec"] in ("bf16", "int8", "int4")
        assert "Mbit/s" in told["reason"]
        assert await trainer.finish() == settings.steps
    assert trainer.losses[0] == pytest.approx(alone[0], rel=1e-3)
    assert trainer.losses[settings.steps - 1] < 0.95 * trainer.losses[0]


@in_virtual_time
async def test_a_node_killed_in_the_second_run_goes_on_from_a_step_of_that_run(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps were written into the folder of the first run, which was opened amid the beginning of the second one."""
    save = StageState.save

    async def save_slowly(state: StageState) -> None:
        await asyncio.sleep(1.0)
        await save(state)

    monkeypatch.setattr(StageState, "save", save_slowly)
    monkeypatch.setattr(training_worker, "LOOK_S", 0.01)
    async with school_of(founded, tmp_path) as school:
        await school.start_all(SPANS)
        first = msgspec.structs.replace(SETTINGS, steps=CHECKPOINT_STEPS)
        assert await school.trainer("first", DATA, first).finish() == CHECKPOINT_STEPS
        homes = school.folder / "homes"
        await asyncio.sleep(30.0)  # other nodes keep and announce backups of the last step meanwhile
        trainer = school.trainer("second", DATA, msgspec.structs.replace(SETTINGS, seed=8))
        await trainer.wait_for_step(CHECKPOINT_STEPS + 1)
        await school.members[SPANS[1]].kill()
        school.start(SPANS[1], SPANS[1])
        assert await trainer.finish() == STEPS
        await school.settle(SPANS)
        written = [step for name in SPANS for step in (homes / name).glob(f"training/*/*/step-{STEPS:08d}")]
        runs = [decode_run((step.parent / RUN_FILE).read_bytes()) for step in written]
        assert [run.seed for run in runs] == [8, 8, 8], "the last step lies in the folder of the second run"
