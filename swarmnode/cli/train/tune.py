"""Command `swarmnode tune`: tune an adapter on the machines of a swarm that serves a model, or in this process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.metrics import MetricsOptions
from swarmnode.cli.options.swarm import SWARM, TRUST, open_swarm, patience_option
from swarmnode.cli.train.train import RecordOptions
from swarmnode.config import SCHEDULES_BY_NAME
from swarmnode.counting import counted
from swarmnode.errors import UsageError
from swarmnode.terminal.console import HOME, LogOptions, command, joined, run_async, say, stopped
from swarmnode.terminal.option import option, path_option
from swarmnode.terminal.training_options import DataOptions

if TYPE_CHECKING:
    from swarmnode.client.tuning.tuning_job import TunedAdapter, TuneSettings
    from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
    from swarmnode.swarm.records.announcement import Trust
    from swarmnode.swarm.records.run import Run
    from swarmnode.swarm.storage.swarmfile import Swarm
    from swarmnode.terminal.training_view import TrainingView

METHODS = ("lora", "lora-fa", "dora", "prompt")
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class AdapterOptions:
    """Options of the adapter. Each is the field of AdapterRecipe with the same name, except `targets`."""

    method: str = option(
        "lora",
        "lora-fa trains one of LoRA's two matrices and keeps less in memory; dora also trains magnitudes; prompt trains a "
        "soft prompt.",
        choices=METHODS,
    )
    rank: int = option(16, "Rank of the adapter's matrices.")
    alpha: float = option(32.0, "Factor of the adapter, divided by the rank.")
    rslora: bool = option(False, "Divide --alpha by the root of the rank.", "--rslora")
    targets: list[str] = option(
        [], "Linear layers to change, by their names' ends, as q_proj; default: all. Repeatable.", metavar="NAME"
    )
    prompt_tokens: int = option(16, "With --method prompt: tokens of the soft prompt.")

    def recipe(self, steps: TuneSteps) -> AdapterRecipe:
        """Return the recipe of the adapter. Raises UsageError if an option is out of its bounds."""
        from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe

        fields = dataclasses.asdict(self)
        targets: Sequence[str] = fields.pop("targets")
        return AdapterRecipe(
            **fields,
            targets=ALL_LINEAR if not targets or ALL_LINEAR in targets else tuple(targets),
            seed=steps.seed,
            weight_decay=steps.weight_decay,
            clip=steps.clip,
        )


@dataclass(frozen=True)
class TuneSteps:
    """Options of the steps. Each is the field of Run with the same name; `schedule` is the recipe's."""

    steps: int = option(0, "Updates in the whole run.", show_default=False)
    batch: int = option(16, "Samples per step.")
    microbatch: int = option(0, "Samples that are computed together; default: 4.", show_default=False)
    sequence: int = option(0, "Tokens per sample; default: 128.", show_default=False)
    learning_rate: float = option(2e-4, "Highest learning rate.", "--lr")
    schedule: str = option("cosine", "Learning rate after the warm-up.", metavar="|".join(SCHEDULES_BY_NAME))
    warmup_steps: int = option(0, "Steps during which the learning rate rises.", "--warmup")
    clip: float = option(1.0, "Largest norm of the whole gradient; 0 turns clipping off.")
    weight_decay: float = option(0.0, "Weight decay of the adapter.")
    seed: int = option(0, "Seed of the adapter's start and of the order of samples.")
    checkpoint_steps: int = option(
        20, "Fetch the adapter's state every this many steps; a lost machine costs at most these."
    )

    def run(self) -> Run:
        """Return the settings of a run. Steps of 0, which follow from the epochs, are 1. Raises UsageError."""
        from swarmnode.client.training.preparation import NO_DATA
        from swarmnode.swarm.records.run import RECIPE, Recipe, Run

        fields = {**dataclasses.asdict(self), "steps": self.steps or 1, "schedule": RECIPE}
        return Run(data=NO_DATA, recipe=Recipe(self.schedule, groups=()), **fields)


@dataclass(frozen=True)
class TuneAlone:
    """Options of a tuning inside this process."""

    local: bool = option(False, "Tune in this process instead, for comparison.")
    threads: int = option(0, "With --local: CPU threads; default: all.", show_default=False)


@dataclass(frozen=True)
class TuneTogether:
    """Options of a tuning that has several trainers."""

    share: bool = option(False, "Let others train this adapter with their data: print a ticket for them.", "--share")
    trainers: int = option(1, "With --share: begin once this many trainers are there.", min=1, max=16)
    average_every: int = option(1, "With --share: steps between two averagings of the trainers.", min=1, max=65536)
    average_codec: str = option(
        "none", "With --share: codec of averaging.", choices=("none", "bf16", "fp16", "int8", "int4", "int2")
    )
    join: str = option(
        "", "Train the adapter of another trainer, by its ticket and settings.", metavar="TICKET", show_default=False
    )

    def settings(self, *led: bool) -> dict[str, Any]:
        """Return fields of TuneSettings. `led`: whether options are given that a leader decides. Raises UsageError."""
        if self.join and (self.share or any(led)):
            raise UsageError(
                "--join takes the leader's settings: leave out --share and options of the adapter and the steps"
            )
        if not self.share and dataclasses.replace(self, join="") != TuneTogether():
            raise UsageError("--trainers, --average-every and --average-codec need --share")
        return {
            "trainers": self.trainers * self.share,
            "ticket": self.join,
            "average_every": self.average_every,
            "average_codec": self.average_codec,
        }


@dataclass(frozen=True)
class TuneOutput:
    """Options of the output, and of the values on their way between machines."""

    out: Path | None = path_option("Write the adapter there, as peft does; its state is kept beside it.", metavar="DIR")
    force: bool = option(False, "Replace an adapter in --out.")
    window: int = option(4, "Microbatches in flight at once.", min=1, max=64)
    codec: str = option(
        "none",
        "How values between machines are encoded; auto lets each machine choose for its links.",
        choices=("none", "auto", "bf16", "fp16", "int8", "int4"),
    )

    @property
    def folder(self) -> Path:
        """Folder for the adapter. Raises UsageError if it is not given."""
        if self.out is None:
            raise UsageError("where shall the adapter go? Give --out with a folder")
        return self.out.absolute()


@command
def tune(
    *,
    swarm: str = SWARM,
    source: DataOptions,
    adapter: AdapterOptions,
    steps: TuneSteps,
    output: TuneOutput,
    together: TuneTogether,
    alone: TuneAlone,
    trust: Trust = TRUST,
    records: RecordOptions,
    patience: float = patience_option(60.0, "How long to wait for machines that tune."),
    home: Path = HOME,
    metrics: MetricsOptions,
    logs: LogOptions,
) -> None:
    """Train an adapter on your data in a swarm that serves.

    The result is a folder for peft.

    Ctrl-C stops; the same command continues from there.

    Example: swarmnode tune friends.swarm --data chats.jsonl --steps 200 --rank 16 --out ./my-adapter
    """
    logs.begin()
    from swarmnode.client.training.preparation import check_early
    from swarmnode.client.tuning.tuning_job import TuneSettings
    from swarmnode.terminal.training_view import training_view

    settings = TuneSettings(
        source.path,
        adapter.recipe(steps),
        steps.run(),
        source.rules(1 if together.join else steps.steps),
        output.folder,
        **together.settings(adapter != AdapterOptions(), steps != TuneSteps(), alone.local),
        window=output.window,
        compress=output.codec,
        force=output.force,
        eval_patience=source.eval_patience,
    )
    settings.check()
    check_early(settings.data, settings.run, records.log)
    place_of = _Place(open_swarm(swarm, home), metrics.watch(home, as_json=records.as_json), trust, patience, alone)
    with training_view(as_json=records.as_json, log=records.log, tensorboard=records.tensorboard) as view:
        done = _run(settings, place_of, view)
    run = settings.run if view.run is None else view.run
    _say_the_end(done, run.steps, settings, as_json=records.as_json)


@dataclass(frozen=True)
class _Place:
    """Swarm to tune in, or to take the model from if `alone.local`."""

    swarm: Swarm
    watch: Any
    trust: Trust
    patience_s: float
    alone: TuneAlone


def _run(settings: TuneSettings, place: _Place, view: TrainingView) -> TunedAdapter:
    """Tune until the end or Ctrl-C."""
    from swarmnode.client.local_training import tune_here
    from swarmnode.client.training.client import TrainerMeter
    from swarmnode.client.tuning.client import TuningClient
    from swarmnode.client.tuning.tuning_job import TuningPlan
    from swarmnode.terminal.training_view import change_lines, plan_lines

    watch, name, plans = place.watch, place.swarm.name, list[TuningPlan]()
    view.beginning = f"joining {name}"

    def tell(plan: TuningPlan) -> None:
        lines = change_lines(plans[-1], plan) if plans else plan_lines(plan)
        plans.append(plan)
        view.beginning = f"step {plan.step} of {plan.run.steps}: waiting for the first step"
        view.going_on(*lines)

    async def with_others(meter: TrainerMeter, stop: asyncio.Event) -> TunedAdapter:
        join = TuningClient.join(place.swarm, watch.home, patience_s=place.patience_s, trust=place.trust)
        client = await joined(join, stop)
        view.beginning = "reading the data, opening the adapter"
        async with client, watch.over(name, lambda: [*meter.readings(), *client.readings()]):
            return await client.tune(settings, meter, stop, tell, view.print_line)

    async def here(meter: TrainerMeter, stop: asyncio.Event) -> TunedAdapter:
        threads = place.alone.threads or None
        async with watch.over(name, meter.readings):
            return await tune_here(
                place.swarm, watch.home, settings, meter, stop, tell, threads=threads, patience_s=place.patience_s
            )

    def feed(stop: asyncio.Event) -> Coroutine[Any, Any, TunedAdapter]:
        view.on_failure = stop.set  # stop the tuning if its steps cannot be shown or logged
        return (here if place.alone.local else with_others)(TrainerMeter(view), stop)

    return run_async(feed)


def _say_the_end(done: TunedAdapter, steps: int, settings: TuneSettings, *, as_json: bool) -> None:
    """Print the last line: on standard error if standard output is for scripts. Ends the command with exit code 1 if steps are
    missing."""
    lost = (
        f" ({counted(done.steps_lost, 'step')} computed again after {counted(done.rewinds, 'fault')})"
        if done.rewinds
        else ""
    )
    if done.stopped:
        say(
            f"Stopped early after {counted(done.steps, 'step')}: {done.stopped}; the adapter is in {settings.out}",
            err=as_json,
        )
    elif done.steps < steps:
        stopped(f"Stopped after step {done.steps:,} of {steps:,}{lost}. The same command continues.")
    else:
        say(f"Done: {counted(done.steps, 'step')}{lost}; the adapter is in {settings.out}", err=as_json)
        if done.method != "prompt":
            path = settings.out if settings.out.is_absolute() else f"./{settings.out}"
            say(f"generate and chat take it with --adapter {path}", err=as_json)
        else:
            say("peft loads it; swarms do not serve soft prompts", err=as_json)
