"""Several trainers of one adapter, each with data and a route of its own, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from swarmnode.codec.tensors import Codec
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.training.adapters.adapter_recipe import METHODS, AdapterRecipe
from swarmnode.compute.training.datasets.batches import Batches, Microbatch
from swarmnode.compute.training.local import StepSummary
from swarmnode.data.rows import NO_LABEL
from swarmnode.errors import LeaderLost, NetworkDown, PeerError, PeerLost
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.links.link_config import LinkConfig
from swarmnode.net.memory.network import FakeWorld
from swarmnode.swarm.records.run import RECIPE, Recipe, Run
from swarmnode.tuning.client.adapter_averaging import Partners, SharedRun, VectorLayout
from swarmnode.tuning.client.follower import Ticket, TuningFollower
from swarmnode.tuning.client.leader import FLOOR_S, TuningLeader
from swarmnode.tuning.client.remote_layers import RemoteLayers
from swarmnode.tuning.client.route_opener import LocalOpener, LocalRoute
from swarmnode.tuning.client.shared_tuner import SharedTuner
from swarmnode.tuning.client.state_shapes import AdapterState, StateShapes
from swarmnode.tuning.client.tuned_route import TunedMicrobatch
from swarmnode.tuning.client.tuner import AdapterTuner
from tests.compute.inline_executor import InlineExecutor
from tests.net.virtual import in_virtual_time
from tests.peer.toy_peer import HELLO, ToyPeer
from tests.tiny import TinyModel

ROWS, LENGTH, VOCABULARY, MICROBATCHES = 1, 8, 97, 1
PASS_S = 0.5  # seconds of each piece of a trainer's work
LORA = AdapterRecipe(rank=2, alpha=4.0, prompt_tokens=3, targets=("q_proj", "v_proj", "down_proj"))


class Drawn(Batches):
    """Random rows of the trainers with these seeds, one after another in a step. Rows have different numbers of labels."""

    def __init__(self, *seeds: int) -> None:
        self.seeds = seeds
        self.fingerprint = bytes(32)

    def samples(self, run: Run) -> int:
        return 1

    def rows(self, numbers: list[int], run: Run) -> Microbatch:
        raise NotImplementedError

    def microbatch(self, step: int, number: int, run: Run) -> Microbatch:
        drawn = [self._drawn(step, one) for one in range(run.microbatches)]
        counts = [int((labels_BS != NO_LABEL).sum()) for _, labels_BS in drawn]
        share = torch.tensor([[counts[number] * len(counts) / sum(counts)]])
        return Microbatch((drawn[number][0],), (drawn[number][1], share))

    def _drawn(self, step: int, number: int) -> tuple[Tensor, Tensor]:
        seed = self.seeds[number // MICROBATCHES]
        generator = torch.Generator().manual_seed(1000 * seed + 10 * (step % 3) + number % MICROBATCHES)
        ids_BS = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=generator)
        labels_BS = ids_BS.clone()
        labels_BS[:, : 1 + 2 * seed + step % 2] = NO_LABEL
        return ids_BS, labels_BS


def run_of(steps: int, trainers: int = 1) -> Run:
    return Run(
        data=bytes(32),
        steps=steps,
        batch=ROWS * MICROBATCHES * trainers,
        microbatch=ROWS,
        sequence=LENGTH,
        learning_rate=2e-2,
        checkpoint_steps=3,
        schedule=RECIPE,
        recipe=Recipe("constant", groups=()),
        label_weights=True,
    )


class Opener(LocalOpener):
    """Opener whose route fails at the calls that a test wants to fail."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fails: Callable[[str, int], bool] = lambda _call, _step: False

    async def open(self, state: AdapterState | None) -> LocalRoute:
        route, opener = await super().open(state), self
        update = route.update

        async def failing(step: int, learning_rate: float, scale: float) -> None:
            if opener.fails("before", step):
                raise PeerLost("a hop has died", peer="hop")
            await update(step, learning_rate, scale)
            if opener.fails("after", step):
                raise PeerLost("a hop has died", peer="hop")

        route.update = failing  # type: ignore[method-assign]
        return route

    def failed(self, error: PeerError | NetworkDown) -> None:
        assert error.peer == "hop", error


@dataclass
class Trainer:
    """Trainer with all that it heard and keeps."""

    opener: Opener
    executor: InlineExecutor
    losses: dict[int, float] = field(default_factory=dict)
    states: list[AdapterState] = field(default_factory=list)
    on_step: Callable[[int], None] = lambda _step: None
    tuner: AdapterTuner | None = None

    @classmethod
    def on(cls, span: ModelSpan, recipe: AdapterRecipe, cost_s: float = PASS_S) -> Trainer:
        executor = InlineExecutor(lambda _item: cost_s)
        return cls(Opener(span, executor, recipe, (ROWS, LENGTH + recipe.prompt_positions)), executor)

    def tunes(
        self, run: Run, batches: Batches, partners: Partners | None = None, state: AdapterState | None = None
    ) -> AdapterTuner:
        async def keep(state: AdapterState) -> None:
            self.states.append(state)

        def hear(report: StepSummary) -> None:
            assert report.step not in self.losses, "a step is told once"
            self.losses[report.step] = report.loss
            self.on_step(report.step)

        clock, recipe = asyncio.get_running_loop().time, self.opener._recipe
        given: Any = (self.opener, recipe, run, batches, hear, lambda _route: None, keep, clock, state)
        self.tuner = AdapterTuner(*given) if partners is None else SharedTuner(*given, partners=partners)
        return self.tuner


class Scene:
    """A leader and its followers on a network in memory, each on a span of its own."""

    def __init__(self, folder: Path, recipe: AdapterRecipe, run: Run, every: int, codec: Codec, trainers: int) -> None:
        self.folder, self.recipe, self.run = folder, recipe, run
        self.world = FakeWorld(seed=1)
        self.peers = [ToyPeer(self.world.join(), LinkConfig(), HELLO) for _ in range(trainers)]
        self.trainers = [Trainer.on(self.span(), recipe) for _ in range(trainers)]
        layout = VectorLayout.of(StateShapes.of(self.span().family, recipe))
        self.averaging = SharedRun(run, every, codec)
        self.leader = TuningLeader(self.peers[0], recipe, self.averaging, layout, trainers=trainers)
        self.stop = asyncio.Event()
        self.layout = layout

    def span(self) -> ModelSpan:
        return load_span(Checkpoint(self.folder), 0, 4, dtype=torch.float32, check=False)

    @property
    def ticket(self) -> Ticket:
        leader = self.leader
        return Ticket(bytes(32), self.peers[0].network.peer_id, (), leader.adapter, leader.secret)

    async def lead(self, state: AdapterState | None = None) -> int:
        try:
            tuner = self.trainers[0].tunes(self.run, Drawn(0), self.leader, state)
            return await tuner.tune(self.stop)
        finally:
            await self.leader.close()

    async def follow(self, place: int = 1, stop: asyncio.Event | None = None) -> int:
        follower = await TuningFollower.join(self.peers[place], self.ticket)
        try:
            assert follower.recipe == self.recipe and follower.averaging == self.averaging
            follower.layout = self.layout
            tuner = self.trainers[place].tunes(follower.averaging.run, Drawn(place), follower)
            return await tuner.tune(stop or asyncio.Event())
        finally:
            await follower.close()

    def weights(self, place: int) -> Tensor:
        return self.layout.vector(self.trainers[place].states[-1].layers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel.save(tmp_path_factory.mktemp("tiny"), layers=2).folder


@asynccontextmanager
async def scene_of(
    folder: Path,
    recipe: AdapterRecipe = LORA,
    *,
    steps: int = 6,
    every: int = 1,
    codec: Codec = Codec.NONE,
    trainers: int = 2,
) -> AsyncIterator[Scene]:
    scene = Scene(folder, recipe, run_of(steps), every, codec, trainers)
    await scene.leader.start()
    for peer in scene.peers[1:]:
        await peer.network.connect(await scene.peers[0].network.addresses(), timeout_s=1)
    yield scene
    await scene.leader.close()
    await asyncio.sleep(1.0)
    kept = [peer.link_config.ledger.accounts()[Account.AVERAGING] for peer in scene.peers]
    assert kept == [0] * trainers, "nothing stays behind"
    for one in scene.trainers:
        await one.executor.close()
    for peer in scene.peers:
        await peer.network.close()


async def alone(folder: Path, recipe: AdapterRecipe, steps: int, trainers: int = 2) -> Trainer:
    """Train one process on the union of the trainers' microbatches."""
    span = load_span(Checkpoint(folder), 0, 4, dtype=torch.float32, check=False)
    one = Trainer.on(span, recipe)
    await one.tunes(run_of(steps, trainers), Drawn(*range(trainers))).tune(asyncio.Event())
    await one.executor.close()
    return one


@pytest.mark.parametrize("method", METHODS)
@in_virtual_time
async def test_two_trainers_are_one_process_on_all_of_their_microbatches(folder: Path, method: str) -> None:
    recipe = AdapterRecipe(method, LORA.rank, LORA.alpha, LORA.targets, prompt_tokens=3)
    async with scene_of(folder, recipe, steps=20) as scene:
        assert await asyncio.gather(scene.lead(), scene.follow()) == [20, 20]
        expected = (await alone(folder, recipe, 20)).losses
        for one in scene.trainers:
            assert one.losses == pytest.approx(expected, rel=1e-5)
        assert torch.equal(scene.weights(0), scene.weights(1)) and expected[19] < expected[1]


@in_virtual_time
async def test_averaging_every_four_steps_is_a_plain_loop_of_torch(folder: Path) -> None:
    """AdamW of each trainer on its own gradients, and every fourth step the mean of the weights, by labels."""
    async with scene_of(folder, steps=10, every=4) as scene:
        scene.trainers[1].opener.fails = lambda call, step: call == "after" and step == 5 and len(lost) < 2
        lost: list[int] = []
        scene.trainers[1].opener.failed = lambda _error: lost.append(1)  # type: ignore[method-assign]
        assert await asyncio.gather(scene.lead(), scene.follow()) == [10, 10]
        assert len(lost) == 2
        losses, weights_N = await plain_loop(scene)
        for place, one in enumerate(scene.trainers):
            assert [one.losses[step] for step in range(10)] == pytest.approx(losses[place], rel=1e-5)
        assert torch.equal(scene.weights(0), scene.weights(1))
        assert torch.allclose(scene.weights(0), weights_N, rtol=1e-4, atol=1e-6)


async def plain_loop(scene: Scene) -> tuple[list[list[float]], Tensor]:
    """Losses of each trainer, and the weights at the end, with torch's own optimiser and clipping."""
    losses: list[list[float]] = [[], []]
    units = StateShapes.of(scene.span().family, LORA).units
    remotes = [RemoteLayers(Trainer.on(scene.span(), LORA, 0.0).opener, units, 1, MemoryLedger()) for _ in losses]
    starts = [await remote.start() for remote in remotes]
    names = [name for _, name, _ in scene.layout.tensors]
    trained = [[start[name].clone().requires_grad_() for name in names] for start in starts]
    optimizers = [torch.optim.AdamW(weights, lr=scene.run.learning_rate, weight_decay=0.0) for weights in trained]
    labels = [0, 0]
    for step in range(scene.run.steps):
        for place, remote in enumerate(remotes):
            rows = [Drawn(place).microbatch(step, number, scene.run) for number in range(MICROBATCHES)]
            counts = [int((labels_BS != NO_LABEL).sum()) for _, (labels_BS, _) in rows]
            given = [TunedMicrobatch(n, one.inputs, one.labels[:1], 1 / sum(counts)) for n, one in enumerate(rows)]
            weights = {name: one.detach() for name, one in zip(names, trained[place], strict=True)}
            found = [await remote.loss(weights, one) for one in given]
            losses[place].append(sum(loss for loss, _ in found))
            labels[place] += sum(counts)
            for name, one in zip(names, trained[place], strict=True):
                one.grad = torch.stack([gradients[name] for _, gradients in found]).sum(dim=0)
            clip_grad_norm_(trained[place], 1.0)
            optimizers[place].step()
        if step % 4 == 3 or step == scene.run.steps - 1:
            share = labels[0] / sum(labels)
            with torch.no_grad():
                for one, other in zip(*trained, strict=True):
                    one.mul_(share).add_(other, alpha=1 - share)
                    other.copy_(one)
            labels = [0, 0]
    for remote in remotes:
        await remote.close()
    return losses, torch.cat([one.detach().flatten() for one in trained[0]])


@pytest.mark.parametrize("call", ["before", "after"])
@in_virtual_time
async def test_a_lost_hop_of_one_trainer_changes_nothing_and_costs_no_step(folder: Path, call: str) -> None:
    """Also between two hops' updates by a mean that the other trainer has taken already."""
    async with scene_of(folder, steps=6) as scene:
        failures = {0: [1, 4], 1: [2, 5]}
        for place, one in enumerate(scene.trainers):
            steps = failures[place]
            one.opener.fails = lambda at, step, steps=steps: at == call and steps[:1] == [step] and bool(steps.pop(0))
        assert await asyncio.gather(scene.lead(), scene.follow()) == [6, 6]
        expected = (await alone(folder, LORA, 6)).losses
        for one in scene.trainers:
            assert one.losses == pytest.approx(expected, rel=1e-5)
            assert one.tuner is not None and (one.tuner.rewinds, one.tuner.steps_lost) == (2, 0)
        assert torch.equal(scene.weights(0), scene.weights(1))


@pytest.mark.parametrize("harm", ["kill", "hang", "late"])
@in_virtual_time
async def test_a_trainer_that_fails_is_left_out_and_another_joins(folder: Path, harm: str) -> None:
    """The leader waits for it for a time that is bounded. One that was too slow goes on from the leader's state."""
    async with scene_of(folder, steps=9, trainers=3) as scene:
        scene.leader._wanted = 2
        victim, joins, joined = scene.peers[1].network.peer_id, asyncio.Event(), scene.trainers[2]
        clock = asyncio.get_running_loop().time

        def strike(step: int) -> None:
            if step == 2 and harm == "late":
                scene.trainers[1].executor._cost_s = lambda _item: slow.pop() if slow else PASS_S
            elif step == 2:
                (scene.world.kill if harm == "kill" else scene.world.hang)(victim)
            if step == 4:
                joins.set()

        slow = [FLOOR_S + 5.0]
        scene.trainers[0].on_step = strike

        async def join() -> int:
            await joins.wait()
            return await scene.follow(2)

        done = await asyncio.gather(scene.lead(), scene.follow(1), join(), return_exceptions=True)
        assert (done[0], done[2]) == (9, 9) and sorted(scene.trainers[0].losses) == [*range(9)]
        assert torch.equal(scene.weights(0), scene.weights(2)) and min(joined.losses) >= 5
        if harm == "late":
            assert done[1] == 9 and torch.equal(scene.weights(0), scene.weights(1))
            assert len(scene.trainers[1].losses) < 9, "steps without it are not its own"
        else:
            assert isinstance(done[1], LeaderLost)
        assert clock() < 300


@pytest.mark.parametrize("way", ["dies", "stops"])
@in_virtual_time
async def test_without_the_leader_a_checkpoint_stands(folder: Path, way: str) -> None:
    async with scene_of(folder, steps=8) as scene:

        def strike(step: int) -> None:
            if step == 4 and way == "dies":
                scene.world.kill(scene.peers[0].network.peer_id)
            elif step == 4:
                scene.stop.set()

        scene.trainers[0].on_step = strike
        leading = asyncio.ensure_future(scene.lead())
        follower = scene.trainers[1]
        if way == "dies":
            with pytest.raises(LeaderLost, match="has gone"):
                await scene.follow()
        else:
            assert await scene.follow() == 5
            assert follower.tuner is not None and "leader" in follower.tuner.ended
        assert follower.states[-1].step == 5 and sorted(follower.losses) == [*range(5)]
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)


@pytest.mark.parametrize("codec", [Codec.BF16, Codec.INT8, Codec.INT4])
@in_virtual_time
async def test_compressed_parts_leave_all_trainers_equal_and_near(folder: Path, codec: Codec) -> None:
    async with scene_of(folder, steps=6, codec=codec) as scene:
        assert await asyncio.gather(scene.lead(), scene.follow()) == [6, 6]
        expected = (await alone(folder, LORA, 6)).losses
        assert torch.equal(scene.weights(0), scene.weights(1))
        assert scene.trainers[1].losses == pytest.approx(expected, rel=0.05)
        assert scene.layout.size_bytes(codec) < 0.6 * scene.layout.size_bytes(Codec.NONE)


@in_virtual_time
async def test_a_leader_goes_on_in_the_middle_of_a_round_and_others_join_there(folder: Path) -> None:
    async with scene_of(folder, steps=8, every=4) as scene:
        stop, before = asyncio.Event(), Trainer.on(scene.span(), LORA)
        before.on_step = lambda step: stop.set() if step == 1 else None
        assert await before.tunes(scene.run, Drawn(0)).tune(stop) == 2
        await before.executor.close()
        assert await asyncio.gather(scene.lead(before.states[-1]), scene.follow()) == [8, 8]
        assert [sorted(one.losses) for one in scene.trainers] == [[*range(2, 8)]] * 2
        assert torch.equal(scene.weights(0), scene.weights(1))
        assert [state.step for state in scene.trainers[1].states] == [2, 3, 4, 6, 8]
