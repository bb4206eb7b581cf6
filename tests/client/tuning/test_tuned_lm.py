"""An adapter as a torch module trains as the swarm's own optimiser would train it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from swarmnode.client.tuning.tuned_lm import Run, TunedCausalLM
from swarmnode.compute.executor import Executor
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.training.adapters.recipe import AdapterRecipe
from swarmnode.compute.training.adapters.trainer import AdapterTrainer
from swarmnode.errors import UsageError
from swarmnode.tuning.client.local_route import LocalOpener
from swarmnode.tuning.client.remote_gradients import RemoteGradients
from tests.tiny import TinyModel

RECIPE = AdapterRecipe(rank=2, alpha=4.0, clip=1.0)
IDS = torch.arange(24).reshape(2, 12)
STEPS, RATE = 4, 1e-2


@pytest.fixture
def run() -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def make(folder: Path, units: int) -> tuple[Executor, LocalOpener]:
    executor = Executor()
    span = load_span(Checkpoint(folder), 0, units, dtype=torch.float32, check=False)
    return executor, LocalOpener(span, executor, RECIPE, (2, 12))


def test_a_plain_loop_draws_the_curve_of_the_trainer(run: Run, tmp_path: Path) -> None:
    tiny = TinyModel.save(tmp_path / "tiny", layers=2)
    executor, opener = run(make(tiny.folder, tiny.units))
    module = TunedCausalLM(run, RemoteGradients(opener), RECIPE, None, "tiny")
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        for row in IDS.split(1):  # two microbatches of a step
            loss = module(row, torch.ones_like(row), num_items_in_batch=22).loss
            (2 * loss / 2).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        after = module(IDS).loss.item()
    with pytest.raises(UsageError, match="padding"):
        module(IDS, torch.tensor([[0] + [1] * 11] * 2))
    module.save_pretrained(tmp_path / "out")
    module.close()
    run(executor.close())
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == 2
    expected, last = alone(tiny)
    assert [first + second for first, second in zip(losses[::2], losses[1::2], strict=True)] == pytest.approx(
        expected, 1e-5
    )
    assert after == pytest.approx(last, 1e-5) and last < expected[0]


def alone(tiny: TinyModel) -> tuple[list[float], float]:
    """Losses of the trainer with its own optimiser, and the loss after the last step."""
    span = load_span(Checkpoint(tiny.folder), 0, tiny.units, dtype=torch.float32, check=False)
    trainer = AdapterTrainer(span, RECIPE, name="alone")
    losses = []
    for step in range(STEPS + 1):
        trainer.forward(0, IDS)
        loss, count = trainer.loss(0, IDS, 1 / 22)
        losses.append(loss / count)
        trainer.backward(0)
        norm = trainer.gradient_square() ** 0.5
        trainer.step(step, RATE, min(1.0, 1.0 / (norm + 1e-6)))
    return losses[:-1], losses[-1]
