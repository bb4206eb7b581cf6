"""Job of tuning one adapter: settings, data, the checkpoint on the disk, and the output, wherever the steps are computed.

Plan of a tuning: what each peer of its route will hold and see, and how long a step is expected to take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from swarmnode.client.training.client import EarlyStopping, Listener
from swarmnode.client.training.preparation import NO_DATA, prepare_text
from swarmnode.codec.body import HopSpec
from swarmnode.codec.tuning_messages import AdapterOpened
from swarmnode.compute.model.checkpoint import CONFIG_FILE, load_config
from swarmnode.compute.model.family import Family, family_of
from swarmnode.compute.stopwatch import TRAINING_WORK
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.compute.training.adapters.layers import check_targets
from swarmnode.compute.training.datasets.batches import Batches
from swarmnode.counting import counted
from swarmnode.data.samples import DataRules
from swarmnode.errors import LeaderLost, UsageError
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.records.manifest import CAUSAL_LM, SERVE, Manifest
from swarmnode.swarm.records.run import RECIPE, Run
from swarmnode.swarm.storage.small_files import check_free
from swarmnode.swarm.storage.swarmfile import Swarm
from swarmnode.tuning.client.adapter_averaging import Partners
from swarmnode.tuning.client.route_opener import HERE
from swarmnode.tuning.client.shared_tuner import SharedTuner
from swarmnode.tuning.client.state_shapes import write_adapter
from swarmnode.tuning.client.tuner import AdapterRoute, AdapterTuner, RouteOpener, SavedTuning


@dataclass(frozen=True)
class PlannedHop:
    """Hop of a tuning: its name, its layers, the bytes that it keeps, and what its owner could see: nothing new on this machine."""

    name: str
    hop: HopSpec
    held: AdapterOpened
    sees: tuple[str, ...]


@dataclass(frozen=True)
class TuningPlan:
    """Plan of a tuning on one route, from step `step` on. `step_s` is 0 if the speed of a peer is not known.

    `why` says why the route before was left; empty for the first route, and after a departure in order.
    """

    recipe: AdapterRecipe
    run: Run
    step: int
    hops: tuple[PlannedHop, ...]
    step_s: float
    why: str = ""


def expected_step_s(run: Run, hops: Sequence[HopSpec], peers: Mapping[PeerId, Announcement], window: int) -> float:
    """Estimate the seconds of a step from announced speeds: microbatches flow through the hops, `window` at a time.

    Returns 0 if a speed is not known. The estimate counts neither the network nor the hops' sessions.
    """
    hop_s = []
    for hop in hops:
        told = peers.get(hop.peer)
        speed = 0.0 if told is None else told.prefill_units_per_s
        if not speed:
            return 0.0
        hop_s.append((hop.end - hop.start) * run.positions * TRAINING_WORK / speed)
    return sum(hop_s) + (run.microbatches - 1) * max(max(hop_s), sum(hop_s) / window)


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
            hops, announced = [], peers()
            for index, (hop, sizes) in enumerate(route.sizes):
                told = announced.get(hop.peer)
                name = (told.name if told is not None else "") or (HERE if hop.peer == HERE else hop.peer[-8:])
                ids, answers = ("token ids",) * (index == 0), ("answers",) * (index == len(route.sizes) - 1)
                sees = () if hop.peer == HERE else ("activations", "gradients", *ids, *answers)
                hops.append(PlannedHop(name, hop, sizes, sees))
            step_s = expected_step_s(run, [hop for hop, _ in route.sizes], announced, settings.window)
            on_plan(TuningPlan(settings.recipe, run, tuner.step, tuple(hops), step_s, tuner.fault))

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
