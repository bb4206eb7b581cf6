"""Commands `swarmnode train` and `export`: feed data to a swarm that trains, or train the same model in this process, and write the
trained model as a checkpoint."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.metrics import MetricsOptions, Watch
from swarmnode.cli.options.swarm import SWARM, THIS_SWARM, open_swarm, patience_option
from swarmnode.cli.train.recipe import RecipeOptions, ScheduleOptions, check_keys, read_recipe, recipe_text, with_file
from swarmnode.counting import counted
from swarmnode.errors import UsageError
from swarmnode.terminal.console import (
    HOME,
    JSON,
    LogOptions,
    Verbosity,
    command,
    fail,
    joined,
    print_json,
    run_async,
    say,
    stopped,
    unless_stopped,
)
from swarmnode.terminal.option import argument, option, path_option
from swarmnode.terminal.progress import bytes_bar, spinner
from swarmnode.terminal.training_options import AveragingOptions, CompressionOptions, DataOptions

if TYPE_CHECKING:
    from swarmnode.client.training.client import TrainerMeter
    from swarmnode.data.samples import DataRules
    from swarmnode.swarm.records.run import Run
    from swarmnode.swarm.storage.swarmfile import Swarm
    from swarmnode.terminal.training_view import TrainingView


@dataclass(frozen=True)
class RecordOptions:
    """Options of the records of each step."""

    log: Path | None = path_option("Write a JSON line per step to this file.")
    tensorboard: Path | None = path_option("Write losses for TensorBoard into this folder.", metavar="DIR")
    as_json: bool = option(False, "Print a JSON line per step.", "--json")


@dataclass(frozen=True)
class LocalOptions:
    """Options of a training inside this process, without a swarm, for comparison."""

    local: bool = option(False, "Train in this process instead, for comparison.")
    out: Path | None = path_option("With --local: write the trained model there.", metavar="DIR")
    state: Path | None = path_option("With --local: keep the state there, and go on from it.", metavar="DIR")
    device: str = option("auto", "With --local: auto, cpu, cuda, cuda:1 or mps.")
    threads: int = option(0, "With --local: CPU threads; default: all.", show_default=False)
    force: bool = option(False, "Replace a checkpoint in --out.")

    def __post_init__(self) -> None:
        """Check that the other options come with `local`. Raises UsageError if they do not."""
        paths = self.out is not None or self.state is not None
        if not self.local and (paths or self.force or self.device != "auto" or self.threads):
            raise UsageError(
                "--out, --state, --force, --device and --threads need --local; to write a swarm's model, use `swarmnode export`"
            )


@command
def train(
    *,
    swarm: str = SWARM,
    source: DataOptions,
    schedule: ScheduleOptions,
    recipes: RecipeOptions,
    averages: AveragingOptions,
    compression: CompressionOptions,
    robust: bool = option(
        False, "Among strangers: one of three or more replicas cannot spoil the average, and liars are excluded."
    ),
    records: RecordOptions,
    alone: LocalOptions,
    patience: float = patience_option(60.0, "How long to wait for the swarm's answer."),
    home: Path = HOME,
    metrics: MetricsOptions,
    logs: LogOptions,
) -> None:
    """Train a swarm's model on your data. Any number of trainers can share the work, with the same data and settings.

    Ctrl-C stops; the same command continues from there.

    Example: swarmnode train school.swarm --data ./texts --steps 1000 --batch 32 --sequence 256 --lr 6e-4 --warmup 50
    """
    logs.begin()
    from swarmnode.client.training.preparation import NO_DATA, check_early, check_trains
    from swarmnode.swarm.records.run import Run

    values, groups = read_recipe(recipes.recipe)
    check_keys(values, DataOptions, ScheduleOptions, RecipeOptions)
    source, schedule, recipes = with_file(source, values), with_file(schedule, values), with_file(recipes, values)
    recipe = recipes.made(schedule.schedule, groups)
    if recipes.print_recipe:
        say(recipe_text(recipe.groups, source, schedule, recipes))
        return
    data, rules = source.path, source.rules(schedule.steps)
    averaging, compressed = averages.averaging(robust=robust), compression.compression()
    settings = Run(data=NO_DATA, averaging=averaging, compression=compressed, recipe=recipe, **schedule.fields())
    check_early(data, settings, records.log)
    known = open_swarm(swarm, home)
    if known.manifest is not None:
        check_trains(known.manifest)
    as_json = records.as_json
    watch = metrics.watch(home, as_json=as_json)
    work = TrainingWork(known, watch, data, rules, settings, patience)
    here = None if not alone.local else replace(alone, out=alone.out and alone.out.absolute())

    from swarmnode.client.training.client import EarlyStopping, TrainerMeter
    from swarmnode.terminal.training_view import training_view

    with training_view(as_json=as_json, log=records.log, tensorboard=records.tensorboard) as view:

        def feed(stop: asyncio.Event) -> Coroutine[Any, Any, tuple[int, bool]]:
            view.on_failure = early.stop = stop.set  # stop the training if its steps cannot be shown or logged
            meter = TrainerMeter(early)
            return work.in_swarm(meter, stop, view) if here is None else work.here(here, meter, stop)

        early = EarlyStopping(view, source.eval_patience)
        done, is_new = run_async(feed)
    run = settings if view.run is None else view.run
    if early.stopped and done < run.steps:
        say(f"Stopped early after {counted(done, 'step')}: {early.stopped}", err=as_json)
        return
    if done == run.steps and not is_new:
        say(
            f"Nothing to do: all {counted(done, 'step')} of this run are done. Another --seed begins another.",
            err=as_json,
        )
    is_narrow = known.manifest is not None and bool(known.manifest.bottleneck)
    follows = f"generate {shlex.quote(swarm)} TEXT" if is_narrow else f"export {shlex.quote(swarm)} OUT"
    _say_where_it_stands(done, run, alone, follows, as_json=as_json)


@dataclass(frozen=True)
class TrainingWork:
    """Training of a swarm's model on `data`, by `rules` of the data and `settings` of the run."""

    swarm: Swarm
    watch: Watch
    data: Path
    rules: DataRules
    settings: Run
    patience_s: float

    async def in_swarm(self, meter: TrainerMeter, stop: asyncio.Event, view: TrainingView) -> tuple[int, bool]:
        """Feed the swarm, and return the number of steps that are done and whether it needed this trainer. Raises as
        `TrainingClient.join` and `train` do."""
        from swarmnode.client.training.client import TrainingClient

        view.beginning = f"joining {self.swarm.name}"
        joining = TrainingClient.join(self.swarm, self.watch.home, patience_s=self.patience_s)
        client = await joined(joining, stop)
        view.beginning = ""
        async with client, self.watch.over(self.swarm.name, lambda: [*meter.readings(), *client.readings()]):
            done = await client.train(self.data, self.settings, meter, stop, self.rules)
            return done, client.fed > 0

    async def here(self, alone: LocalOptions, meter: TrainerMeter, stop: asyncio.Event) -> tuple[int, bool]:
        """Train in this process, and return the number of steps that are done and whether any was new. Raises as `train_here`
        does."""
        from swarmnode.client.local_training import LocalDevice, OutputFolder, train_here

        async with self.watch.over(self.swarm.name, meter.readings):
            done = await train_here(
                *(self.swarm, self.watch.home, self.data, self.settings, meter, stop),
                place=LocalDevice(alone.device, alone.threads or None),
                rules=self.rules,
                output=None if alone.out is None else OutputFolder(alone.out, alone.force),
                state=None if alone.state is None else alone.state.absolute(),
                patience_s=self.patience_s,
            )
            return done, bool(meter.last)


def _say_where_it_stands(done: int, settings: Run, alone: LocalOptions, follows: str, *, as_json: bool) -> None:
    """Print the last line: on standard error if standard output is for scripts. Ends the command with exit code 1 if steps are
    missing."""
    saved = f" The model is in {alone.out}." if alone.out is not None else ""
    if done < settings.steps:
        goes_on = "" if alone.local and alone.state is None else " The same command continues."
        stopped(f"Stopped after step {done:,} of {settings.steps:,}.{goes_on}{saved}")
    next_step = "" if alone.local else f" Next: swarmnode {follows}"
    say(f"Done: {counted(done, 'step')}.{saved}{next_step}", err=as_json)


@command
def export(
    *,
    swarm: str = THIS_SWARM,
    out: Path = argument(..., "Folder to write; it appears when it is complete.", typed=Path, metavar="OUT"),
    force: bool = option(False, "Replace a checkpoint in OUT."),
    average: bool = option(
        True,
        "Write the average of the weights if the training keeps one (--ema), or those of the last step.",
        "--average/--last",
    ),
    patience: float = patience_option(30.0, "How long to wait for machines that hold all layers."),
    home: Path = HOME,
    as_json: bool = JSON,
    logs: Verbosity,
) -> None:
    """Write the newest step of a training as a checkpoint.

    This works during training, too. Load a language model with transformers' from_pretrained, a module with load_state_dict.

    Example: swarmnode export school.swarm ./trained
    """
    logs.begin()
    from swarmnode.swarm.storage.small_files import check_free

    target = out.absolute()
    check_free(target, force=force)
    known = open_swarm(swarm, home)
    from swarmnode.client.training.client import TrainingClient

    unconfirmed: list[str] = []

    async def fetch(stop: asyncio.Event) -> int | None:
        with spinner(f"Joining {known.name}", quiet=as_json) as joining:
            client = await joined(TrainingClient.join(known, home, patience_s=patience), stop)
            joining.now("Asking for the newest step")
            async with client:
                with bytes_bar("Fetching the trained weights", quiet=as_json) as progress:
                    exporting = client.export(
                        target,
                        force=force,
                        patience_s=patience,
                        average=average,
                        progress=progress,
                        on_unconfirmed=unconfirmed.extend,
                    )
                    return await unless_stopped(exporting, stop)

    step = run_async(fetch)
    if step is None:
        fail("interrupted; nothing was written: run the command again")
    if as_json:
        print_json({"out": str(out), "step": step, "unconfirmed": unconfirmed})
    else:
        say(f"Wrote the model after {counted(step, 'step')} to {out}")
        if unconfirmed:
            say(
                f"Only one machine had the state of these parts, or another has a different one: {', '.join(unconfirmed)}"
            )
