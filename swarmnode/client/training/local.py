"""Training of a swarm's model in this process alone: the same data and settings give the same curve."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from swarmnode.checkpoints.export import write_checkpoint
from swarmnode.client.training.client import TrainingClient
from swarmnode.client.training.listener import Listener
from swarmnode.client.training.preparation import check_trains, prepare
from swarmnode.compute.device import probe_device, set_threads
from swarmnode.compute.graph import segment as graphs
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training import lm
from swarmnode.compute.training.learner import Learner
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
    manifest, folder = await _founded(swarm, home, patience_s)
    run, batches = await asyncio.to_thread(prepare, manifest, folder, data, settings, rules)
    set_threads(place.threads)
    segment = await asyncio.to_thread(_load, manifest, folder, place.device)
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
        tensors = _tensors(learner)
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


async def _founded(swarm: Swarm, home: Path, patience_s: float) -> tuple[Manifest, Path]:
    """Return the manifest and the folder with all files: the founder's own folder if it is here, else files from peers."""
    if swarm.manifest is not None:
        check_trains(swarm.manifest)
    folder = await founders_folder(swarm)
    if folder is not None and swarm.manifest is not None:
        return swarm.manifest, folder
    async with await TrainingClient.join(swarm, home, patience_s=patience_s) as client:
        return client.manifest, await client.founded()


async def founders_folder(swarm: Swarm) -> Path | None:
    """Return the folder that the swarm was founded on; None if it is not here. Raises CheckpointError if a file has changed."""
    if swarm.manifest is None or swarm.checkpoint is None or not swarm.checkpoint.is_dir():
        return None
    await asyncio.to_thread(_verify, swarm.manifest, swarm.checkpoint)
    return swarm.checkpoint


def _verify(manifest: Manifest, folder: Path) -> None:
    """Raise CheckpointError if a file differs from the one that the swarm was founded on."""
    for file in manifest.files:
        path = folder / file.name
        if not path.is_file() or not verify_file(path, file):
            raise CheckpointError(
                f"{path} has been changed, damaged or removed since the swarm was founded: restore it"
            )


def _load(manifest: Manifest, folder: Path, device: str) -> Segment:
    where = probe_device(device).torch_device
    if manifest.kind == CAUSAL_LM:
        return lm.load_segment(Checkpoint(folder), 0, manifest.model.units, device=where)
    return graphs.load_segment(folder, 0, manifest.model.units, device=where)


def _tensors(learner: Learner) -> dict[str, Tensor]:
    """Return the parameters, or their average if the run keeps one, and the buffers, by their names in the state dict."""
    blocks = [learner.block(number) for number in learner.blocks]
    parts = (part for block in blocks for part in (block.parameters, block.buffers, block.ema))
    return {name: tensor.detach().cpu() for part in parts for name, tensor in part.items()}
