"""Training of a swarm's model, or tuning of an adapter on it, in this process alone: the same settings give the same curve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from swarmnode.checkpoints.checkpoint_export import write_checkpoint
from swarmnode.client.training.client import Listener, TrainingClient
from swarmnode.client.training.preparation import check_exports, check_trains, prepare
from swarmnode.client.tuning.client import TuningClient
from swarmnode.client.tuning.tuning_job import TunedAdapter, TuneSettings, TuningJob, TuningPlan, check_tunes
from swarmnode.compute.device import probe_device, set_threads
from swarmnode.compute.executor import Executor
from swarmnode.compute.graph import graph_segment as graphs
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.training import lm
from swarmnode.compute.training.local import StepSummary, local_learner, train_steps
from swarmnode.compute.training.segment import Segment
from swarmnode.compute.training.snapshot import LocalState
from swarmnode.data.samples import DataRules
from swarmnode.errors import CheckpointError, NotFinite
from swarmnode.swarm.records.manifest import CAUSAL_LM, Manifest
from swarmnode.swarm.records.run import Run
from swarmnode.swarm.storage.content import verify_file
from swarmnode.swarm.storage.small_files import check_free
from swarmnode.swarm.storage.swarmfile import Swarm
from swarmnode.tuning.client.route_opener import LocalOpener


@dataclass(frozen=True)
class LocalDevice:
    """Device for local training. `threads` None means as many as there are cores."""

    device: str = "auto"
    threads: int | None = None


@dataclass(frozen=True)
class OutputFolder:
    """Output folder of the trained model; `force` replaces an existing checkpoint."""

    folder: Path
    force: bool = False


async def train_here(
    swarm: Swarm,
    home: Path,
    data: Path,
    settings: Run,
    listener: Listener,
    stop: asyncio.Event,
    *,
    place: LocalDevice,
    rules: DataRules = DataRules(),
    output: OutputFolder | None = None,
    state: Path | None = None,
    patience_s: float = 60.0,
) -> int:
    """Train the whole model until the run is over or `stop` is set, and return the number of finished steps.

    With `state`, a folder, the training goes on from the state in it, with the optimiser's memory, and writes it.
    The model is written to `output` at the end, even if the training was stopped or met a loss that is not finite; then the last
    good step is written and NotFinite is raised. Raises UsageError if data, settings and model do not fit, CheckpointError,
    LocalError.
    """
    if output is not None:
        check_free(output.folder, force=output.force)
    manifest, folder = await founded_files(swarm, home, patience_s, TrainingClient, check_trains)
    if output is not None:
        check_exports(manifest)
    run, batches = await asyncio.to_thread(prepare, manifest, folder, data, settings, rules)
    set_threads(place.threads)
    where, units = probe_device(place.device).torch_device, (0, manifest.model.units)
    if manifest.kind == CAUSAL_LM:
        segment: Segment = await asyncio.to_thread(lm.load_segment, Checkpoint(folder), *units, device=where)
    else:
        segment = await asyncio.to_thread(graphs.load_segment, folder, *units, device=where)
    learner = await asyncio.to_thread(local_learner, segment, run, batches)
    listener.begun(run, batches.summary(run))
    done = 0
    bad: NotFinite | None = None
    try:
        there = None if state is None else LocalState(state)
        done = await _listen(train_steps(learner, batches, state=there), listener, stop, run.steps)
    except NotFinite as error:
        bad = error
    if output is not None:
        # The parameters, or their average if the run keeps one, and the buffers, by their names in the state dict.
        blocks = [learner.block(number) for number in learner.blocks]
        parts = (part for block in blocks for part in (block.parameters, block.buffers, block.ema))
        tensors = {name: tensor.detach().cpu() for part in parts for name, tensor in part.items()}
        language = manifest.kind == CAUSAL_LM
        await asyncio.to_thread(write_checkpoint, language, tensors, folder, output.folder, force=output.force)
    if bad is not None:
        kept = f"the last good step is in {output.folder}" if output is not None else "the step was not applied"
        raise NotFinite(f"{kept}; {bad}", unit=bad.unit)
    return done


async def _listen(
    steps: Generator[StepSummary, None, None], listener: Listener, stop: asyncio.Event, count: int
) -> int:
    """Compute the steps one by one in a thread of their own, and return the number of finished steps, of `count` in all."""
    loop = asyncio.get_running_loop()
    done = 0
    with ThreadPoolExecutor(1, thread_name_prefix="training") as thread:
        while not stop.is_set():
            report = await loop.run_in_executor(thread, next, steps, None)
            if report is None:
                return count
            done = report.step + 1
            listener.step(report)
        await loop.run_in_executor(thread, steps.close)  # it may have a state to write
    return done


async def founded_files(
    swarm: Swarm,
    home: Path,
    patience_s: float,
    client: type[TrainingClient] | type[TuningClient],
    check: Callable[[Manifest], None],
) -> tuple[Manifest, Path]:
    """Return the manifest and the folder with all files: the founder's own folder if it is here, else files from peers, to which
    a `client` joins. Raises CheckpointError if a file here has changed, and what `check` raises."""
    if swarm.manifest is not None:
        check(swarm.manifest)
        folder = swarm.checkpoint
        if folder is not None and folder.is_dir():
            for file in swarm.manifest.files:
                path = folder / file.name
                if not path.is_file() or not await asyncio.to_thread(verify_file, path, file):
                    raise CheckpointError(
                        f"{path} has been changed, damaged or removed since the swarm was founded: restore it"
                    )
            return swarm.manifest, folder
    async with await client.join(swarm, home, patience_s=patience_s) as joined:
        return joined.manifest, await joined.founded()


async def tune_here(
    swarm: Swarm,
    home: Path,
    settings: TuneSettings,
    listener: Listener,
    stop: asyncio.Event,
    on_plan: Callable[[TuningPlan], None] = lambda _plan: None,
    *,
    threads: int | None = None,
    patience_s: float = 60.0,
) -> TunedAdapter:
    """Tune an adapter on the whole model in this process; see `TuningClient.tune`. Also raises Full if there is no memory."""
    settings.check()
    manifest, folder = await founded_files(swarm, home, patience_s, TuningClient, check_tunes)
    job = await asyncio.to_thread(TuningJob.prepare, swarm, manifest, folder, settings)
    set_threads(threads)
    where = probe_device("auto").torch_device
    span = await asyncio.to_thread(
        load_span, Checkpoint(folder), 0, manifest.model.units, device=where, dtype=torch.float32
    )
    executor = Executor(threads=threads)
    try:
        opener = LocalOpener(span, executor, settings.recipe, job.size)
        return await job.run_on(opener, listener, stop, on_plan, dict, time.monotonic)
    finally:
        await executor.close()
