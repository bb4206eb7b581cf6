"""Job of tuning one adapter: settings, data, the checkpoint on the disk, and the output, wherever the steps are computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from swarmnode.client.training.listener import EarlyStopping, Listener
from swarmnode.client.training.preparation import NO_DATA, prepare_text
from swarmnode.client.tuning.plan import TuningPlan, plan_of
from swarmnode.compute.model.checkpoint import CONFIG_FILE, load_config
from swarmnode.compute.model.family import Family, family_of
from swarmnode.compute.training.adapters.recipe import AdapterRecipe
from swarmnode.compute.training.adapters.targets import check_targets
from swarmnode.compute.training.datasets.batches import Batches
from swarmnode.counting import counted
from swarmnode.data.rules import DataRules
from swarmnode.errors import LeaderLost, UsageError
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.records.manifest import CAUSAL_LM, SERVE, Manifest
from swarmnode.swarm.records.recipe import RECIPE
from swarmnode.swarm.records.run import Run
from swarmnode.swarm.storage.small_files import check_free
from swarmnode.swarm.storage.swarmfile import Swarm
from swarmnode.tuning.client.averaging import Partners
from swarmnode.tuning.client.output import write_adapter
from swarmnode.tuning.client.saved_tuning import SavedTuning
from swarmnode.tuning.client.shared_tuner import SharedTuner
from swarmnode.tuning.client.tuner import AdapterRoute, AdapterTuner, RouteOpener


@dataclass(frozen=True)
class TuneSettings:
    """Settings of a tuning. `run` counts steps and sizes and has the learning rate; `window` microbatches are in flight at once.

    With `trainers` above 0 this is the leader of several trainers, and begins once that many are there. With a `ticket` it follows
    the leader that gave it, whose recipe and run replace these. They average every `average_every` steps.
    """

    data: Path
    recipe: AdapterRecipe
    run: Run
    rules: DataRules
    out: Path
    window: int = 4
    compress: str = "none"  # of values between hops
    force: bool = False
    trainers: int = 0
    ticket: str = ""
    average_every: int = 1
    average_codec: str = "none"
    eval_patience: int = 0  # evaluations without a lower loss of held-out data, after which the tuning ends; 0: never

    def check(self) -> None:
        """Raise UsageError if the output folder holds something else."""
        check_free(self.out, force=self.force)

    def as_led(self, recipe: AdapterRecipe, run: Run) -> TuneSettings:
        """Return the settings of a follower: the leader's recipe and run, with data of its own."""
        own = msgspec.structs.replace(run.known_recipe, evaluate_every=0, evaluation=0)
        run = msgspec.structs.replace(run, data=NO_DATA, schedule=RECIPE, recipe=own, label_weights=msgspec.UNSET)
        return replace(self, recipe=recipe, run=run)

    @property
    def state_file(self) -> Path:
        """File of the last checkpoint, beside the output folder."""
        return self.out.with_name(f"{self.out.name}.tuning")


@dataclass(frozen=True)
class TunedAdapter:
    """Result of a tuning: the number of steps that are done, and how many were computed again after faults.

    `stopped` says why the adapter was written before the last step; empty if it was not. `method` is the adapter's.
    """

    steps: int
    rewinds: int
    steps_lost: int
    stopped: str = ""
    method: str = field(default="lora", compare=False)


def check_tunes(manifest: Manifest) -> None:
    """Raise UsageError if the swarm serves no language model."""
    if manifest.kind != CAUSAL_LM or manifest.mode != SERVE:
        raise UsageError(
            f"the swarm {manifest.name} serves no language model: adapters are tuned in a swarm that serves one; to train all "
            "weights use `swarmnode train`"
        )


@dataclass(frozen=True)
class TuningJob:
    """Job of tuning one adapter for the model `base`. `batches` are the data, cut as `run` says."""

    base: bytes  # id of the swarm
    name: str  # of the swarm
    family: Family
    settings: TuneSettings
    run: Run
    batches: Batches

    @classmethod
    def prepare(cls, swarm: Swarm, manifest: Manifest, folder: Path, settings: TuneSettings) -> TuningJob:
        """Read the data for the model whose config and tokenizer are in `folder`. Raises UsageError if something does not fit."""
        check_tunes(manifest)
        family = family_of(load_config(folder / CONFIG_FILE))
        check_targets(family, settings.recipe)
        # a soft prompt stands before a row, so a row has one sample
        rules = replace(settings.rules, packs=settings.rules.packs and not settings.recipe.prompt_positions)
        run, batches = prepare_text(manifest, folder, settings.data, settings.run, rules)
        return cls(swarm.id, manifest.name, family, settings, run, batches)

    @property
    def size(self) -> tuple[int, int]:
        """Rows of a microbatch, and positions of a row with the soft prompt."""
        return self.run.microbatch, self.run.sequence + self.settings.recipe.prompt_positions

    async def run_on(
        self,
        routes: RouteOpener,
        listener: Listener,
        stop: asyncio.Event,
        on_plan: Callable[[TuningPlan], None],
        peers: Callable[[], Mapping[PeerId, Announcement]],
        clock: Callable[[], float],
        partners: Partners | None = None,
    ) -> TunedAdapter:
        """Go on from the checkpoint, if there is one, until the run is over or `stop` is set. `partners` are other trainers.

        The output is written at the end of the run, also at an early one by `settings.eval_patience` or by the leader.

        Raises UsageError if the checkpoint is of another job, NotFinite, NoRoute, Busy, LocalError if the disk is full, LeaderLost.
        """
        settings, run = self.settings, self.run
        saved = SavedTuning(settings.state_file, self.base, settings.recipe, run)
        state = await asyncio.to_thread(saved.load)
        early = EarlyStopping(listener, settings.eval_patience)
        early.stop = stop.set
        listener.begun(run, self.batches.summary(run))

        def opened(route: AdapterRoute) -> None:
            on_plan(plan_of(settings.recipe, run, route.sizes, peers(), window=settings.window))

        make = AdapterTuner if partners is None else partial(SharedTuner, partners=partners)
        tuner = make(
            routes,
            settings.recipe,
            run,
            self.batches,
            on_step=early.step,
            on_open=opened,
            on_state=lambda state: asyncio.to_thread(saved.save, state),
            clock=clock,
            state=state,
        )
        try:
            steps = await tuner.tune(stop)
        except LeaderLost as lost:
            steps = 0 if tuner.state is None else tuner.state.step
            kept = f"; the state after {counted(steps, 'step')} is in {settings.state_file}" if steps else ""
            raise LeaderLost(f"{lost}{kept}") from lost
        why = early.stopped or tuner.ended
        is_over = steps == run.steps or bool(why)
        if is_over and tuner.state is not None:
            write = partial(write_adapter, self.family, settings.recipe, tuner.state, settings.out, base=self.name)
            await asyncio.to_thread(write)
            settings.state_file.unlink(missing_ok=True)
        stopped = why if steps < run.steps and tuner.state is not None else ""
        return TunedAdapter(steps, tuner.rewinds, tuner.steps_lost, stopped, settings.recipe.method)
