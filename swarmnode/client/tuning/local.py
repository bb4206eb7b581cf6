"""Tuning of an adapter in this process: the same trainer and the same steps as in a swarm, for comparison."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import torch

from swarmnode.client.training.listener import Listener
from swarmnode.client.training.local import founders_folder
from swarmnode.client.tuning.client import TuningClient
from swarmnode.client.tuning.job import TunedAdapter, TuneSettings, TuningJob, TuningPlan, check_tunes
from swarmnode.compute.device import probe_device, set_threads
from swarmnode.compute.executor import Executor
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.swarm.records.manifest import Manifest
from swarmnode.swarm.storage.swarmfile import Swarm
from swarmnode.tuning.client.route_opener import LocalOpener


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
    manifest, folder = await _founded(swarm, home, patience_s)
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


async def _founded(swarm: Swarm, home: Path, patience_s: float) -> tuple[Manifest, Path]:
    """Return the manifest and the folder with all files: the founder's own folder if it is here, else files from peers."""
    folder = await founders_folder(swarm)
    if folder is not None and swarm.manifest is not None:
        check_tunes(swarm.manifest)
        return swarm.manifest, folder
    async with await TuningClient.join(swarm, home, patience_s=patience_s) as client:
        return client.manifest, await client.founded()
