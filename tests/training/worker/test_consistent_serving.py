"""A swarm that trains and serves: a pass sees the parameters of one step, whenever they are updated."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import torch
from torch import Tensor

from swarmnode.codec.messages import Want
from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode, encode
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment, load_twin
from swarmnode.serving.job import Job, JobResult, Return
from swarmnode.serving.worker import Worker
from tests.compute.training.conftest import build, make_run, pass_through

PATIENCE_S = 120.0
LET_IT_S = 0.2  # for an update that could come in between; one that comes later is missed, never seen where it is not
IDS_BT = torch.arange(8)[None]


class TrainedAndServed:
    """A learner and its serving twin on one executor."""

    def __init__(self, folder: Path) -> None:
        build("gpt2").save_pretrained(folder)
        checkpoint = Checkpoint(folder)
        segment = load_segment(checkpoint, 0, checkpoint.units)
        self.learner = Learner(segment, make_run())
        self.span = load_twin(checkpoint, segment)
        self.executor = Executor()
        self.worker = Worker(StageRunner(self.span, RunnerConfig(cache_bytes=1 << 24)), self.executor)
        self._sessions = 0

    def truth(self) -> Tensor:
        """Logits of the model as it is now."""
        with torch.inference_mode():
            return self.span.forward(IDS_BT, cache=None).clone()

    def update(self) -> asyncio.Future[None]:
        """The end of a step, as a stage commits it."""
        learner = self.learner
        return self.executor.call(
            Urgency.CONTROL, lambda: learner.commit({}, learner.squared_norm(learner.blocks) ** 0.5), kind="try"
        )

    async def serve(self) -> Tensor:
        """Logits as a session of its own gets them."""
        self._sessions += 1
        done: asyncio.Future[JobResult] = asyncio.get_running_loop().create_future()
        self.worker.open(self._sessions, rows=1, max_length=16)
        self.worker.submit(
            Job(
                self._sessions,
                0,
                IDS_BT.shape[1],
                (encode(IDS_BT, Codec.NONE),),
                Return(),
                lambda _job, result, _run: done.set_result(result),
                self.worker.clock(),
                want=Want.ALL,
            )
        )
        result = await asyncio.wait_for(done, PATIENCE_S)
        return decode(*result.tensors[0])


async def test_an_update_comes_before_a_pass_or_after_it_and_never_into_it(tmp_path: Path) -> None:
    both = TrainedAndServed(tmp_path)
    await both.worker.start()
    pass_through([both.learner], 0)
    before = both.truth()
    loop, updating, updated = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    updates: list[asyncio.Future[None]] = []

    def update() -> None:
        updates.append(both.update())
        updates[0].add_done_callback(lambda _: updated.set())
        updating.set()

    def in_the_middle(*_: object) -> None:
        hook.remove()
        loop.call_soon_threadsafe(update)
        updated.wait(LET_IT_S)

    hook = both.span.stack.get_submodule("1").register_forward_pre_hook(in_the_middle)
    served = await both.serve()
    await updating.wait()
    await updates[0]
    after = both.truth()
    assert not torch.equal(before, after)
    torch.testing.assert_close(served, before, rtol=0, atol=0)
    torch.testing.assert_close(await both.serve(), after, rtol=0, atol=0)
    await both.worker.close()
    await both.executor.close()
