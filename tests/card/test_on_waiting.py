"""How often a pass waits for the card: once, however many sessions share it; and how often something goes up or comes down."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator

import pytest
import torch

from swarmnode.codec.sampling import Sampling
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.compress.codecs import decode_values, encode, encode_values
from swarmnode.compute.executor import Executor
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving import device_transfers
from swarmnode.compute.serving.device_transfers import DeviceOutputs
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner
from swarmnode.compute.serving.sampler import Sampler, sample
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.errors import ErrorCode
from swarmnode.plan.compression import CodecSchedule
from swarmnode.serving.job import ForwardHidden, Job, JobResult, Sample
from swarmnode.serving.worker import Worker
from swarmnode.swarm.records.run import Run
from tests.card.conftest import LAYERS
from tests.card.simulated import Counts, SimulatedCards

UNITS = LAYERS + 2
HIDDEN = 32
HOPS = {"first": (0, 2), "middle": (2, 3), "last": (3, UNITS)}
SAMPLED = Sampling(prompt_length=1, max_new_tokens=50, temperature=1.0, top_p=1.0, top_k=0, seed=1, stop_ids=())


class Hop:
    """One hop's sessions, all at the same position."""

    def __init__(self, span: tuple[int, int], checkpoint: Checkpoint, card: torch.device, sessions: int) -> None:
        self.is_first, self.is_last = span[0] == 0, span[1] == UNITS
        self.executor = Executor()
        self.runner = StageRunner(load_span(checkpoint, *span, device=card), RunnerConfig(1 << 22))
        self.worker = Worker(self.runner, self.executor)
        self.sessions = range(sessions)
        self.start = 0
        for session in self.sessions:
            self.runner.open(session, rows=1, max_length=60)

    async def step(self, codec: Codec = Codec.INT8, spoilt: int = -1) -> dict[int, JobResult]:
        """One position of all sessions, in one pass."""
        jobs = [self._job(session, codec, session == spoilt) for session in self.sessions]
        self.start += 1
        # Who goes with whom is not the scheduler's here.
        finishes, _ = await self.worker.call("pass", lambda: self.worker._compute(jobs))
        return {session: finishes[id(job)]() for session, job in zip(self.sessions, jobs, strict=True)}

    def _job(self, session: int, codec: Codec, is_spoilt: bool) -> Job:
        if self.is_first:
            part = (TensorInfo(Codec.NONE, DType.INT64, (1, 1)), struct.pack("<q", session + 1))
        else:
            hidden_BTH = torch.randn(1, 1, HIDDEN, generator=torch.Generator().manual_seed(session))
            part = encode(hidden_BTH * float("nan") if is_spoilt else hidden_BTH, Codec.NONE if is_spoilt else codec)
        then = Sample(Sampler(SAMPLED, 60), first=1) if self.is_last else ForwardHidden(CodecSchedule(codec))
        return Job(session, self.start, 1, (part,), then, lambda *_: None, self.executor.clock())


@pytest.fixture(params=[1, 8])
def sessions(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=HOPS)
async def hop(
    request: pytest.FixtureRequest, sessions: int, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> AsyncIterator[Hop]:
    hop = Hop(HOPS[request.param], checkpoints["llama"], card, sessions)
    await hop.worker.start()
    yield hop
    await hop.worker.close()
    await hop.executor.close()


async def test_a_decode_pass_waits_once(hop: Hop, cards: SimulatedCards, card: torch.device) -> None:
    for _ in range(3):
        results = await hop.step()
    before = cards.counts(card.index)
    results = await hop.step()
    after = cards.counts(card.index)
    assert {result.error for result in results.values()} == {None}
    counts = zip(after, before, strict=True)
    assert Counts(*(now - then for now, then in counts))[1:4] == (1, 1, 1)


async def test_who_sends_nan_fails_alone(hop: Hop, sessions: int) -> None:
    if hop.is_first or sessions == 1:
        return
    await hop.step()
    results = await hop.step(spoilt=3)
    assert results[3].error == ErrorCode.NOT_FINITE and results[3].bad_input
    assert all(result.error is None for session, result in results.items() if session != 3)
    results = await hop.step()
    assert all(result.error is None for session, result in results.items() if session != 3)


@pytest.mark.parametrize("major", [6, 7, 8], ids=["float32", "float16", "bfloat16"])
def test_a_training_stage_waits_twice_there_and_twice_back(
    major: int, cards: SimulatedCards, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    """For finiteness, and for what comes out. In float16 whether something overflowed is read with that."""
    cards.majors = [major, major]
    assert training_waits(cards, card, checkpoints["llama"], autocast=True) == (2, 2)


def training_waits(
    cards: SimulatedCards, card: torch.device, checkpoint: Checkpoint, *, autocast: bool
) -> tuple[int, int]:
    """Of a stage of one layer, there and back."""
    run = Run(data=bytes(32), steps=6, batch=4, microbatch=2, sequence=12, autocast=autocast)
    learner = Learner(load_segment(checkpoint, 2, 3, device=card), run)
    hidden_BTH = torch.randn(2, 12, HIDDEN)
    sent = encode_values((hidden_BTH,))
    returned = encode_values((hidden_BTH,))
    for lease in range(2):
        before = cards.counts(card.index).waits
        values = decode_values(sent[0], bytearray(b"".join(sent[1])), card)
        encode_values(learner.forward(lease, lease, 2, 3, values))
        there = cards.counts(card.index).waits
        (gradient_BTH,) = decode_values(returned[0], bytearray(b"".join(returned[1])), card)
        encode_values([learner.backward(lease, (gradient_BTH,))[0]])
    return there - before, cards.counts(card.index).waits - there


@pytest.mark.parametrize(("spread", "downloads"), [(6.0, 1), (0.01, 2)], ids=["usual", "all are alike"])
def test_of_a_large_vocabulary_twelve_kilobytes_come_down(
    spread: float, downloads: int, cards: SimulatedCards, card: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1025 logits with their ids, and the logarithm of the sum, instead of 513 KB; all of them where the draw lies behind these."""
    brought: list[int] = []
    to_host = device_transfers._to_host
    monkeypatch.setattr(device_transfers, "_to_host", lambda far_M: (brought.append(far_M.nbytes), to_host(far_M))[1])
    logits_BKV = spread * torch.randn(1, 1, 128_256, generator=torch.Generator().manual_seed(2))
    far_BKV, outputs = logits_BKV.to(card), DeviceOutputs()
    before = cards.counts(card.index)
    draw = Sampler(SAMPLED, 60).launch(far_BKV, 5, outputs)
    assert cards.counts(card.index).waits == before.waits, "others may be added to the pass"
    (drawn,) = draw(outputs.fetch())
    after = cards.counts(card.index)
    assert brought == [12_308]
    assert (after.downloads - before.downloads, after.waits - before.waits) == (downloads, downloads)
    assert drawn.ids == tuple(sample(logits_BKV[:, 0], SAMPLED, 5).tolist())
