"""Tuning of an adapter in this process: the same trainer and the same steps as in a swarm, for comparison."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import torch

from swarmnode.client.training.listener import Listener
from swarmnode.client.training.local import founded
from swarmnode.client.tuning.client import TunedAdapter, TuneSettings, check_tunes, prepared, tune_on, window_size
from swarmnode.client.tuning.plan import TuningPlan
from swarmnode.compute.device import probe_device, set_threads
from swarmnode.compute.executor import Executor
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.swarm.storage.swarmfile import Swarm
from swarmnode.tuning.client.local_route import LocalOpener


async def tune_here(
    swarm: Swarm,
    home: Path,
    settings: TuneSettings,
    listener: Listener,
    stop: asyncio.Event,
    on_plan: Callable[[TuningPlan], None],
    *,
    threads: int | None = None,
    patience_s: float = 60.0,
) -> TunedAdapter:
    """Tune an adapter on the whole model here; see `TuningClient.tune`. Raises LocalError if the memory does not suffice, too."""
    settings.check()
    manifest, folder = await founded(swarm, home, patience_s, check_tunes)
    run, batches = await asyncio.to_thread(prepared, manifest, folder, settings)
    set_threads(threads)
    device = probe_device("auto").torch_device
    checkpoint = Checkpoint(folder)
    span = await asyncio.to_thread(load_span, checkpoint, 0, manifest.model.units, device=device, dtype=torch.float32)
    executor = Executor(threads=threads)
    try:
        opener = LocalOpener(span, executor, settings.recipe, window_size(settings, run))
        return await tune_on(opener, manifest, folder, settings, run, batches, listener, stop, on_plan)
    finally:
        await executor.close()
