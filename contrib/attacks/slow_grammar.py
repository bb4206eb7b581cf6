"""A session's grammar takes long for every token, to delay all other sessions on the same device."""

from __future__ import annotations

import asyncio
import statistics
import struct
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from attack import Outcome, main
from torch import Tensor

from swarmnode.codec.messages import Want
from swarmnode.codec.sampling import Grammar, GrammarKind, Sampling
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.compute.executor import Executor
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.grammar import GrammarCompiler, GrammarMatcher
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner
from swarmnode.compute.serving.sampler import Sampler
from swarmnode.serving.job import Job, JobResult, Pass, Return, Sample
from swarmnode.serving.worker import Worker
from tests.gateway.speaking import save_speaking_llama

VIRTUAL, FAST = False, False

AMBIGUOUS = "start: a*\na: b*\nb: /.{1,9}/ | /[^\\n]/ | b b | a a"
SEES_S = 0.05  # minimum time of a mask, as with a vocabulary of 150,000 tokens
PROMPT = [7, 8, 9]
TEXTS, TOKENS = 3, 12  # of the attacker
STEPS = 40


class Heavy(GrammarMatcher):
    """Looks at the tokens as often as a large vocabulary would take, and notes on which thread."""

    seconds: ClassVar[defaultdict[str, float]] = defaultdict(float)

    def allowed(self, text: Sequence[int]) -> Tensor:
        began_s = time.perf_counter()
        allowed_V = super().allowed(text)
        while time.perf_counter() - began_s < SEES_S:
            super().allowed([])
            allowed_V = super().allowed(text)
        self.seconds[threading.current_thread().name] += time.perf_counter() - began_s
        return allowed_V


class Hop:
    """All units of a model on one device, and the sessions that use them."""

    def __init__(self, folder: Path) -> None:
        save_speaking_llama(folder)
        self.folder = folder
        self.executor = Executor()
        checkpoint = Checkpoint(folder)
        runner = StageRunner(load_span(checkpoint, 0, checkpoint.units), RunnerConfig(cache_bytes=1 << 24))
        self.worker = Worker(runner, self.executor)
        self.compute_thread = ""

    async def start(self) -> None:
        await self.worker.start()
        self.compute_thread = await self.worker.call("name", lambda: threading.current_thread().name)

    async def step(self, session: int, start: int, ids: Sequence[int], then: Any) -> JobResult:
        done: asyncio.Future[JobResult] = asyncio.get_running_loop().create_future()

        def deliver(_job: Job, result: JobResult, _run: Pass) -> None:
            done.set_result(result)

        info = TensorInfo(Codec.NONE, DType.INT64, (1, len(ids)))
        payload = struct.pack(f"<{len(ids)}q", *ids)
        parts, now_s = ((info, payload),), self.worker.clock()
        self.worker.submit(Job(session, start, len(ids), parts, then, deliver, now_s, want=Want.LAST))
        return await done

    async def draw(self, session: int, compiler: GrammarCompiler) -> int:
        """Draw a text by the slow grammar, and return its number of tokens."""
        grammar = Grammar(GrammarKind.LARK, AMBIGUOUS)
        matcher = compiler.compile(grammar)
        matcher.__class__ = Heavy
        sampling = Sampling(prompt_length=len(PROMPT), max_new_tokens=TOKENS, temperature=1, grammar=grammar)
        sampler = Sampler(sampling, len(PROMPT) + TOKENS, matcher)
        self.worker.open(session, rows=1, max_length=len(PROMPT) + TOKENS)
        ids, start = PROMPT, 0
        for number in range(TOKENS):
            result = await self.step(session, start, ids, Sample(sampler, len(PROMPT)))
            if result.error is not None:
                return number
            start += len(ids)
            ids = list(result.tokens[0].ids)
        return TOKENS

    async def mean_step_s(self, session: int) -> float:
        """Return the mean seconds of a decode step of a new session without a grammar."""
        self.worker.open(session, rows=1, max_length=STEPS + 1)
        took_s = []
        for position in range(STEPS):
            began_s = time.perf_counter()
            await self.step(session, position, [7], Return())
            took_s.append(time.perf_counter() - began_s)
            await asyncio.sleep(0.005)
        return statistics.mean(took_s)


async def attack() -> Outcome:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        hop = Hop(Path(folder))
        await hop.start()
        compiler = GrammarCompiler(hop.folder, 512)
        try:
            alone_s = await hop.mean_step_s(1)
            attackers = [asyncio.ensure_future(hop.draw(10 + number, compiler)) for number in range(TEXTS)]
            beside_s = await hop.mean_step_s(2)
            came = await asyncio.gather(*attackers)
        finally:
            await hop.worker.close()
            await hop.executor.close()
        there_s, all_s = Heavy.seconds[hop.compute_thread], sum(Heavy.seconds.values())
        return Outcome(
            there_s == 0 and beside_s < max(SEES_S / 2, 8 * alone_s),  # on a busy machine a step takes long alone, too
            f"of {all_s:.1f} s for {sum(came)} tokens by grammars the compute thread spent {there_s:.1f}; a step of another "
            f"session took {1e3 * beside_s:.1f} ms, alone {1e3 * alone_s:.1f}",
        )


main(__name__, attack, virtual=VIRTUAL)
