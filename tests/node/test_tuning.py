"""Adapters tuned by the nodes of a swarm in virtual time: the curve of one process, also if machines fail."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.nn import functional

from swarmnode.client.local_training import tune_here
from swarmnode.client.training.preparation import NO_DATA
from swarmnode.client.tuning.client import ModuleParts, ModuleSettings, TuningClient
from swarmnode.client.tuning.tuning_job import TunedAdapter, TuneSettings, TuningJob, TuningPlan
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.compute.training.local import StepSummary
from swarmnode.config import ServerConfig
from swarmnode.data.samples import DataRules, DataSummary
from swarmnode.errors import Busy, LeaderLost, NoRoute, NotFinite, UsageError
from swarmnode.ledger import Account
from swarmnode.net.memory.medium import Path as NetworkPath
from swarmnode.swarm.records.manifest import FileContent
from swarmnode.swarm.records.run import RECIPE, Recipe, Run
from swarmnode.tuning.client.tuned_route import TunedMicrobatch, TunedRoute
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.test_chat import save_tokenizer
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm
from tests.tiny import PROMPT, TinyModel

STEPS = 6
TEXT = "The quick brown fox jumps over the lazy dog. " * 20
LORA = AdapterRecipe(rank=4, alpha=8.0)
TWO_BY_TWO = {"a1": "0:3", "b1": "3:6", "a2": "0:3", "b2": "3:6"}


@dataclass
class Heard:
    """Listener of a tuning, for its owner. `strike` is called once, after the step `at`."""

    at: int = -1
    strike: Callable[[], None] = lambda: None
    losses: dict[int, float] = field(default_factory=dict)
    took_s: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    plans: list[TuningPlan] = field(default_factory=list)
    why: list[str] = field(default_factory=list)

    def begun(self, run: Run, data: DataSummary) -> None:
        """Keep nothing."""

    def step(self, report: StepSummary) -> None:
        assert report.step not in self.losses, "a step is told once"
        self.losses[report.step] = report.loss
        self.took_s.append(report.step_s)
        if report.held_out_loss is not None:
            self.held_out[report.step] = report.held_out_loss
        if report.step == self.at:
            self.strike()

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        self.why.append(why)


def settings_in(folder: Path, recipe: AdapterRecipe = LORA, **changes: Any) -> TuneSettings:
    data = folder / "data.txt"
    data.write_text(TEXT)
    given = {"steps": STEPS, "batch": 4, "microbatch": 2, "sequence": 16, "learning_rate": 5e-2, "checkpoint_steps": 2}
    schedule = {"schedule": RECIPE, "recipe": Recipe("constant", groups=())}
    run = Run(data=NO_DATA, **{**given, **schedule, **changes})
    return TuneSettings(data, recipe, run, DataRules(), folder / "out")


@asynccontextmanager
async def swarm_of(founded: Founded, folder: Path, spans: dict[str, str], **stage: Any) -> AsyncIterator[VirtualSwarm]:
    """Nodes that lend themselves to tuning, ready."""
    async with VirtualSwarm(folder) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        for name, span in spans.items():
            swarm.node(name, span, **{"tune_share": 0.5, **stage})
        for member in swarm.members.values():
            await member.wait_for("ready")
        yield swarm


@asynccontextmanager
async def owner_of(swarm: VirtualSwarm, name: str = "owner") -> AsyncIterator[TuningClient]:
    client = await TuningClient.join(swarm.load(), swarm.folder / "homes" / name, platform=swarm.platform())
    try:
        yield client
    finally:
        await client.close()


async def tuned(swarm: VirtualSwarm, settings: TuneSettings, heard: Heard) -> TunedAdapter:
    async with owner_of(swarm) as client:
        return await client.tune(settings, heard, asyncio.Event(), heard.plans.append)


def held_bytes(member: VirtualMember) -> int:
    host = member.node._host
    assert host is not None
    accounts = host.link_config.ledger.accounts()
    return accounts[Account.ADAPTERS] + accounts[Account.GRADIENTS] + accounts[Account.OPTIMIZER]


@pytest.fixture(scope="module")
def alone(founded: Founded, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The curve of one process."""
    folder = tmp_path_factory.mktemp("alone")
    heard = Heard()

    async def tune() -> None:
        await tune_here(founded.swarm, folder, settings_in(folder), heard, asyncio.Event())

    asyncio.run(tune())
    return heard.losses


@in_virtual_time
async def test_two_machines_draw_the_curve_of_one_process_and_go_on_serving(
    founded: Founded, tiny: TinyModel, alone: dict[int, float], tmp_path: Path
) -> None:
    began = asyncio.Event()
    heard = Heard(at=0, strike=began.set)
    async with swarm_of(founded, tmp_path, {"a": "0:3", "b": "3:6"}) as swarm, swarm.client() as reader:
        tuning = asyncio.ensure_future(tuned(swarm, settings_in(tmp_path), heard))
        await began.wait()
        text = await reader.generate(PROMPT, max_tokens=24)
        assert not tuning.done(), "the text came while adapters were tuned"
        assert text.ids == tiny.alone(PROMPT, 24), "and is the model's own"
        assert await tuning == TunedAdapter(STEPS, 0, 0)
        assert heard.losses == pytest.approx(alone, rel=1e-5)
        assert heard.losses[STEPS - 1] < heard.losses[0]
        await asyncio.sleep(1.0)
        assert [held_bytes(member) for member in swarm.members.values()] == [0, 0], "nothing stays"


@in_virtual_time
async def test_a_step_of_two_machines_waits_for_four_delays_of_the_link(founded: Founded, tmp_path: Path) -> None:
    """There, on, back and home: neither the norm of the gradient nor the update takes a way of its own."""
    heard = Heard()
    async with swarm_of(founded, tmp_path, {"a": "0:3", "b": "3:6"}) as swarm:
        swarm.world.default_path = NetworkPath(latency_s=0.5)
        await tuned(swarm, settings_in(tmp_path, checkpoint_steps=STEPS), heard)
        assert max(heard.took_s[1:]) == pytest.approx(4 * 0.5, rel=0.1)


@pytest.mark.parametrize(("harm", "place"), [("kill", 0), ("hang", 1), ("leave", 1)])
@in_virtual_time
async def test_a_machine_that_fails_costs_its_steps_since_the_checkpoint_and_changes_no_loss(
    founded: Founded, alone: dict[int, float], tmp_path: Path, harm: str, place: int
) -> None:
    async with swarm_of(founded, tmp_path, TWO_BY_TWO) as swarm:
        struck: list[asyncio.Future[Any]] = []

        def strike() -> None:
            victim = swarm.member(heard.plans[-1].hops[place].hop.peer)
            if harm == "hang":
                swarm.world.hang(victim.peer)
            else:
                struck.append(asyncio.ensure_future(victim.kill() if harm == "kill" else victim.stop()))

        heard = Heard(at=2, strike=strike)
        done = await tuned(swarm, settings_in(tmp_path), heard)
        await asyncio.gather(*struck)
        assert done.steps == STEPS and heard.losses == pytest.approx(alone, rel=1e-5)
        if harm == "leave":
            assert (done.rewinds, done.steps_lost) == (0, 0), "a departure costs nothing"
        else:
            assert done.rewinds >= 1 and done.steps_lost <= 2
        route = [one.hop.peer for one in heard.plans[-1].hops]
        assert heard.plans[0].hops[place].hop.peer not in route
        assert [bool(plan.why) for plan in heard.plans[:2]] == [False, harm != "leave"]


@in_virtual_time
async def test_layers_without_a_holder_are_waited_for_and_a_newcomer_goes_on(
    founded: Founded, alone: dict[int, float], tmp_path: Path
) -> None:
    """Layers of the newcomer are other ones than those of the machine that is gone."""
    async with swarm_of(founded, tmp_path, {"a": "0:3", "b": "3:6"}) as swarm:
        heard = Heard(at=2, strike=lambda: asyncio.ensure_future(replace_b()))

        async def replace_b() -> None:
            await swarm.members["b"].kill()
            await asyncio.sleep(5.0)
            swarm.node("c", "2:6", tune_share=0.5)

        done = await tuned(swarm, settings_in(tmp_path), heard)
        assert done.steps == STEPS and heard.losses == pytest.approx(alone, rel=1e-5)
        assert heard.why, "the owner hears what is missing"
        spans = [(one.hop.start, one.hop.end) for one in heard.plans[-1].hops]
        assert spans[-1][1] == 6 and len(spans) == 2


@pytest.mark.parametrize("method", ["lora-fa", "dora", "prompt"])
@in_virtual_time
async def test_every_method_draws_the_curve_of_one_process(founded: Founded, tmp_path: Path, method: str) -> None:
    """Also where a part of the data is held out."""
    recipe = replace(LORA, method=method, prompt_tokens=3)
    curves = []
    for name in ("alone", "swarm"):
        (tmp_path / name).mkdir()
        settings = replace(
            settings_in(tmp_path / name, recipe, steps=2),
            rules=DataRules(held_out_share=0.2, evaluate_every=2),
        )
        heard = Heard()
        if name == "alone":
            await tune_here(founded.swarm, tmp_path, settings, heard, asyncio.Event())
        else:
            async with swarm_of(founded, tmp_path, {"a": "0:3", "b": "3:6"}) as swarm:
                await tuned(swarm, settings, heard)
        curves.append([*heard.losses.values(), *heard.held_out.values()])
        assert sorted(heard.held_out) == [0, 1]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


@in_virtual_time
async def test_a_tuning_that_was_stopped_goes_on_and_only_with_the_same_settings(
    founded: Founded, alone: dict[int, float], tmp_path: Path
) -> None:
    stop = asyncio.Event()
    heard = Heard(at=2, strike=stop.set)
    settings = settings_in(tmp_path)
    async with (
        swarm_of(founded, tmp_path, {"a": "0:3", "b": "3:6"}, server=ServerConfig(forgotten_s=20.0)) as swarm,
        owner_of(swarm) as client,
    ):
        assert await client.tune(settings, heard, stop) == TunedAdapter(3, 0, 0)
        assert not settings.out.exists() and settings.state_file.exists()
        for changed, words in (
            (replace(settings, recipe=replace(LORA, rank=8)), "rank is 4, not 8"),
            (replace(settings, run=msgspec.structs.replace(settings.run, seed=5)), "'seed' is 5 here and 0 there"),
            (replace(settings, recipe=replace(LORA, targets=("q_prod",))), "no linear layer 'q_prod'"),
        ):
            with pytest.raises(UsageError, match=words):
                await client.tune(changed, Heard(), asyncio.Event())
        assert (await client.tune(settings, heard, asyncio.Event())).steps == STEPS
        assert heard.losses == pytest.approx(alone, rel=1e-5)
        assert settings.out.exists() and not settings.state_file.exists()


def test_rows_behind_a_soft_prompt_have_one_sample_each(founded: Founded, tmp_path: Path) -> None:
    manifest, checkpoint = founded.swarm.manifest, founded.swarm.checkpoint
    assert manifest is not None and checkpoint is not None
    shutil.copy(checkpoint / "config.json", tmp_path)
    save_tokenizer(tmp_path)
    manifest = msgspec.structs.replace(manifest, files=(*manifest.files, FileContent("tokenizer.json", 1, bytes(32))))
    lines = tmp_path / "pairs.jsonl"
    lines.write_text('{"prompt": "quick ", "completion": "fox"}\n' * 8)
    for method, values in (("lora", 2), ("prompt", 1)):
        settings = replace(settings_in(tmp_path, replace(LORA, method=method)), data=lines)
        job = TuningJob.prepare(founded.swarm, manifest, tmp_path, settings)
        assert len(job.batches.microbatch(0, 0, job.run)[0]) == values, "ids, and places in several documents"


@in_virtual_time
async def test_a_tuning_whose_held_out_loss_no_longer_falls_is_over(founded: Founded, tmp_path: Path) -> None:
    settings = replace(
        settings_in(tmp_path, learning_rate=0.0),
        rules=DataRules(held_out_share=0.2, evaluate_every=1),
        eval_patience=1,
    )
    done = await tune_here(founded.swarm, tmp_path, settings, Heard(), asyncio.Event())
    assert done.steps == 2 and "lowest" in done.stopped
    assert settings.out.exists() and not settings.state_file.exists()


@in_virtual_time
async def test_a_loss_that_is_nan_ends_the_tuning_after_a_second_try(founded: Founded, tmp_path: Path) -> None:
    async with swarm_of(founded, tmp_path, TWO_BY_TWO) as swarm, owner_of(swarm) as client:
        heard = Heard()
        settings = settings_in(tmp_path, replace(LORA, clip=0.0), learning_rate=1e38)
        with pytest.raises(NotFinite, match="lower --lr"):
            await client.tune(settings, heard, asyncio.Event(), heard.plans.append)
        routes = {tuple(one.hop.peer for one in plan.hops) for plan in heard.plans}
        assert len(routes) == 2, "one machine's word does not decide"
        assert all(math.isfinite(loss) for loss in heard.losses.values())


@in_virtual_time
async def test_machines_that_lend_nothing_to_tuning_are_left_alone(founded: Founded, tmp_path: Path) -> None:
    """Machines of a public swarm lend nothing unless their owners say so."""
    async with swarm_of(founded, tmp_path, {"a": "0:3", "b": "3:6"}, tune_share=None) as swarm:
        with pytest.raises(NoRoute, match="--tune-share"):
            await tuned(swarm, settings_in(tmp_path), Heard())


@in_virtual_time
async def test_who_stops_while_no_machine_tunes_does_not_wait_for_one(founded: Founded, tmp_path: Path) -> None:
    stop = asyncio.Event()
    heard = Heard()
    async with swarm_of(founded, tmp_path, {"a": "0:3"}) as swarm, owner_of(swarm) as client:
        asyncio.get_running_loop().call_later(5.0, stop.set)
        began_s = asyncio.get_running_loop().time()
        assert await client.tune(settings_in(tmp_path), heard, stop) == TunedAdapter(0, 0, 0)
        assert heard.why and asyncio.get_running_loop().time() - began_s < 6.0


@in_virtual_time
async def test_machines_without_room_are_not_asked_for_ever(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise Busy("no room", retry_s=0.5)

    monkeypatch.setattr("swarmnode.tuning.server.TuningServer._make_place", full)
    async with swarm_of(founded, tmp_path, {"a": "0:3", "b": "3:6"}) as swarm:
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(Busy, match=r"have no room at the moment: .*BUSY"):
            await tuned(swarm, settings_in(tmp_path), Heard())
        assert asyncio.get_running_loop().time() - began_s < 90


@pytest.mark.parametrize("every", [1, 4])
@in_virtual_time
async def test_two_trainers_with_the_same_data_draw_the_curve_of_one_though_one_loses_a_hop(
    founded: Founded, alone: dict[int, float], tmp_path: Path, every: int
) -> None:
    async with (
        swarm_of(founded, tmp_path, TWO_BY_TWO) as swarm,
        owner_of(swarm, "leader") as leader,
        owner_of(swarm, "friend") as friend,
    ):

        def strike() -> None:
            struck.append(asyncio.ensure_future(swarm.member(second.plans[-1].hops[1].hop.peer).kill()))

        struck: list[asyncio.Future[Any]] = []
        first, second, news = Heard(), Heard(at=2, strike=strike), asyncio.Queue[str]()
        settings = replace(settings_in(tmp_path), trainers=2, average_every=every)
        leading = asyncio.ensure_future(
            leader.tune(settings, first, asyncio.Event(), first.plans.append, news.put_nowait)
        )
        ticket = (await news.get()).split()[-1]
        led = replace(
            settings_in(tmp_path, AdapterRecipe(), steps=1), ticket=ticket, out=tmp_path / "friends", compress="auto"
        )
        following = asyncio.ensure_future(friend.tune(led, second, asyncio.Event(), second.plans.append))
        done = await asyncio.gather(leading, following)
        await asyncio.gather(*struck)
        assert [one.steps for one in done] == [STEPS, STEPS] and done[1].rewinds >= 1
        assert done[1].steps_lost <= (0 if every == 1 else 2)
        for heard in (first, second):
            assert heard.losses == pytest.approx(alone, rel=1e-5)
        adapters = [(folder / "adapter_model.safetensors").read_bytes() for folder in (settings.out, led.out)]
        assert adapters[0] == adapters[1]
        with pytest.raises(LeaderLost, match="cannot be reached"):
            await friend.tune(replace(led, out=tmp_path / "late"), Heard(), asyncio.Event())


def loss_at_owner(
    parts: ModuleParts, states: torch.Tensor, labels: torch.Tensor, share: float
) -> tuple[float, torch.Tensor]:
    """The loss by the head that the owner holds, and its gradient for the states that left the swarm."""
    assert parts.ends is not None
    states.requires_grad_()
    logits = parts.ends.logits(states)
    loss = share * functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, states)
    return loss.item(), gradient


@pytest.mark.parametrize(("harm", "place"), [("kill", 0), ("leave", 1), ("hang", 1)])
@in_virtual_time
async def test_a_pass_whose_machine_fails_before_its_gradient_has_the_same_gradients(
    founded: Founded, alone: dict[int, float], tmp_path: Path, harm: str, place: int
) -> None:
    """Also the same as if the swarm computes the loss, which is that of the first step."""
    settings = settings_in(tmp_path)
    async with swarm_of(founded, tmp_path, TWO_BY_TWO) as swarm, owner_of(swarm) as client:
        job = TuningJob.prepare(client.swarm, client.manifest, founded.swarm.checkpoint or tmp_path, settings)
        rows = [job.batches.microbatch(0, number, job.run) for number in range(2)]
        given = [TunedMicrobatch(0, inputs, labels, 1 / 60) for inputs, labels in rows]
        there = await client.module_parts(ModuleSettings(LORA, False, rows=2, positions=16))
        weights = await there.layers.start()
        wanted = [await there.layers.loss(weights, one) for one in given]
        assert sum(loss for loss, _ in wanted) == pytest.approx(alone[0], rel=1e-5)
        await there.layers.close()

        here = await client.module_parts(ModuleSettings(LORA, rows=2, positions=16))
        assert here.ends is not None
        layers, passes = here.layers, []
        for one in given:  # both in flight
            with torch.no_grad():
                entering = here.ends.enter(one.inputs[0], None)
            states, flight = await layers.forward(weights, (entering,), learns=True)
            passes.append((flight, *loss_at_owner(here, states, one.labels[0], one.share)))
        assert [loss for _, loss, _ in passes] == pytest.approx([loss for loss, _ in wanted], rel=1e-5)
        route = layers._route
        assert isinstance(route, TunedRoute) and (route.request.route[0].start, route.request.route[-1].end) == (1, 5)
        victim = swarm.member(route.request.route[place].peer)
        leaving = [asyncio.ensure_future(victim.stop())] if harm == "leave" else []
        if harm == "kill":
            await victim.kill()
        elif harm == "hang":
            swarm.world.hang(victim.peer)
        await asyncio.sleep(1.0)
        backs = []
        for (flight, _, gradient), (_, wanted_gradients) in zip(passes, wanted, strict=True):
            back, gradients = await layers.backward(flight, gradient, trains=True)
            backs.append(back)
            assert gradients.keys() == wanted_gradients.keys()
            assert all(
                torch.allclose(gradients[name], one, rtol=1e-4, atol=1e-7) for name, one in wanted_gradients.items()
            )
        with torch.no_grad():
            _, flight = await layers.forward(weights, (here.ends.enter(given[0].inputs[0], None),), learns=True)
        back, _ = await layers.backward(flight, passes[0][2], trains=False)
        assert torch.allclose(back, backs[0], rtol=1e-4, atol=1e-8)
        assert isinstance(layers._route, TunedRoute)
        assert victim.peer not in [hop.peer for hop in layers._route.request.route]
        await asyncio.gather(*leaving)
        await layers.close()
