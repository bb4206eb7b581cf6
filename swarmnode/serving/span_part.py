"""Parts of a served span: the layers on one device, loaded, tried and measured; and a whole span in host memory during a
pause."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from swarmnode.compute.capacity.capacity import PREFILL_POSITIONS, Speeds, measure_serving
from swarmnode.compute.executor import forget_traceback
from swarmnode.compute.model.equal_bits.equal_rows import unpadded
from swarmnode.compute.model.mtp import GuessingLayer
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.cohort import LONGEST_SHARED, Buffers, CachedSession, Cohort
from swarmnode.compute.serving.mtp_guesses import MtpGuesses
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput
from swarmnode.errors import LocalError, PrecisionError
from swarmnode.ledger import Account, MemoryLedger, Reservation
from swarmnode.measuring.capability import Capability
from swarmnode.measuring.hardware import Hardware, StageResources
from swarmnode.measuring.meters import DECODE
from swarmnode.plan.view import Span
from swarmnode.serving.worker import Worker
from swarmnode.swarm.records.announcement import MAX_BITS_BYTES

log = logging.getLogger(__name__)

COMPANY_PASSES = 64  # passes of several sessions, after which more are expected
COLUMNS = 1_100  # of a trial of equal bits: ggml shares out those of a lone row from 512 on
MAX_BATCH = 64  # rows of one pass in the ledger's estimate
TRIAL_SESSION = -2
CHUNK = 300  # positions of a longer prompt, over plain products whose bounds cut it
COST_STEPS = 5  # of each way, by which the cost of equal bits is measured
PROMPT, PADDING = 8, (0, 5)  # positions of two rows, and the left padding of each


def try_span(runner: StageRunner) -> None:
    """Run a short prompt and a step. Raises PrecisionError if an output is not finite."""
    span = runner.span
    runner.open(TRIAL_SESSION, rows=len(PADDING), max_length=PROMPT + 1, padding=PADDING)
    try:
        outputs = [
            runner.run([StepInput(TRIAL_SESSION, _inputs(span, count), WANT_ALL)])[0].output[:, -1]
            for count in (PROMPT, 1)
        ]
    finally:
        runner.close(TRIAL_SESSION)
    if not bool(torch.stack(outputs).isfinite().all()):
        name = str(span.dtype).removeprefix("torch.")
        raise PrecisionError(
            f"layers [{span.start}:{span.end}) compute NaN or infinity in {name} on {span.device}; use --dtype float32"
        )


@torch.inference_mode()
def find_bits(runner: StageRunner) -> bytes:
    """Compute positions of a fixed input in all kinds of passes, and set `runner.bits`, the span's class, to a hash of the results.

    Peers of one class compute each position with equal bits. The passes have 1, 2, 8 and 33 positions, in rows or one behind
    another, behind COLUMNS columns, with the node's threads and with one. Plain products (`--equal-bits`) are tried with the node's
    threads only, and in a longer prompt. All layers write into the same memory. The class is empty if a position's bits
    depend on its pass, or the span's family cannot be tried.
    """
    span, threads = runner.span, torch.get_num_threads()
    runner.bits = b""
    if not span.has_same_bits or span.family.keeps_states or any(span.packings):
        return runner.bits
    results: list[Tensor] = []
    ways: set[bool] = set()
    try:
        for count in {threads} if span.has_equal_rows else {threads, 1}:
            torch.set_num_threads(count)
            results.append(_compute_in_all_passes(runner, ways))
    except Exception as error:  # a family's code may raise anything
        log.info("%r has no class of equal bits: %s", span, error or type(error).__name__)
        forget_traceback(error)
        return runner.bits
    finally:
        torch.set_num_threads(threads)
    # torch multiplies a plain matrix with other sums for other numbers of rows, which the passes above need not show.
    is_plain = any(
        parameter.dim() > 1 and parameter.numel()
        for module in span.model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    )
    if ways == {False} and is_plain and not span.has_equal_rows:
        return runner.bits
    if len(ways) == 1 and all(result.numel() and torch.equal(result, results[0]) for result in results):
        runner.bits_of_graph = ways.pop()
        runner.bits = hashlib.sha256(results[0].numpy().tobytes()).digest()[:MAX_BITS_BYTES]
    return runner.bits


def cost_of_equal_bits(runner: StageRunner) -> str:
    """Measure what equal bits cost a lone session that decodes, and return it as a sentence."""
    span = runner.span
    ways: dict[bool, Callable[[], contextlib.AbstractContextManager[None]]] = {
        True: contextlib.nullcontext,
        False: unpadded,
    }
    took_s: dict[bool, list[float]] = {is_padded: [] for is_padded in ways}
    runner.open(TRIAL_SESSION, rows=1, max_length=PROMPT + 2 * COST_STEPS)
    try:
        runner.run([StepInput(TRIAL_SESSION, _inputs(span, PROMPT)[:1], WANT_ALL)])
        for _ in range(COST_STEPS):
            for is_padded, way in ways.items():
                began_s = time.perf_counter()
                with way():
                    runner.run([StepInput(TRIAL_SESSION, _inputs(span, 1)[:1], WANT_ALL)])
                took_s[is_padded].append(time.perf_counter() - began_s)
    finally:
        runner.close(TRIAL_SESSION)
    padded, plain = (1 / min(took_s[is_padded]) for is_padded in (True, False))
    return (
        f"Equal bits: layers [{span.start}:{span.end}) decode {padded:.1f} tokens/s, {padded / plain:.2f} times as many as without "
        f"({plain:.1f})"
    )


def _compute_in_all_passes(runner: StageRunner, ways: set[bool]) -> Tensor:
    """Return the results of a prompt's positions behind many columns, empty if they differ from those in other passes. Whether
    passes were graphs of ggml goes to `ways`."""
    span, draw = runner.span, torch.Generator().manual_seed(0)
    longest = min(COLUMNS, span.position_limit or COLUMNS)
    rooms = (window.room for window in runner.pool.windows.values())
    most = min((CHUNK, *rooms)) if span.has_equal_rows else 33
    x_1T = _fixed(draw, (1, min(most, longest), *(() if span.has_embedding else (span.width,))), span)
    kept: dict[tuple[torch.Size, int], Buffers] = {}
    likes: dict[int, Buffers] = {}

    def compute(rows: int, count: int, past: int) -> Tensor:
        session = CachedSession(rows, past + count, [0] * rows, span.layers_of(span.start, span.end))
        session.length = past
        session.cohort = cohort = Cohort(
            [session], session.max_length, span.device, runner.pool.windows, runner.pool.store
        )
        cohort.refresh_rows()
        for layer, like in likes.items():
            key = like[0].shape, cohort.columns_in(layer)
            if key not in kept or kept[key][0].shape[0] != rows:
                kept[key] = cohort.store.allocate(like[0], like[len(like) // 2], rows, key[1])
                first = cohort.first_kept(layer)
                for buffer in kept[key]:
                    columns = _fixed(draw.manual_seed(1), (longest + 1, 1, *buffer.shape[1:2], *buffer.shape[3:]), span)
                    columns = columns[first : first + buffer.shape[2]] * (1 if buffer.is_floating_point() else 64)
                    buffer[:, :, : len(columns)] = columns.permute(1, 2, 0, 3)
                    buffer[:, :, len(columns) :] = 0
            cohort.buffers[layer] = kept[key]
        cohort.make_room(count)
        x = x_1T[:, :count].expand(rows, *x_1T[:, :count].shape[1:]).contiguous()
        output = runner.graphs.run(cohort, x, span.start, span.end, count) if runner.graphs is not None else None
        ways.add(output is not None)
        if output is None:
            positions = cohort.position_ids(count)
            output = span.forward(x, cache=cohort, position_ids=positions, keep_last=count)
        likes.update(cohort.buffers)
        return output.float()

    compute(1, 1, 0)  # makes buffers, whose shapes the others have
    past, length = longest - x_1T.shape[1], x_1T.shape[1]
    part = min(33, length)
    few = min(64, past)
    prompt = compute(1, length, past)
    same = [compute(1, 1, past), compute(2, min(2, length), past), compute(1, part, past)]
    is_same = all(torch.equal(one, prompt[:, : one.shape[1]].expand(len(one), -1, -1)) for one in same)
    alone, beside = compute(1, 1, few), compute(8, 1, few)
    is_same &= torch.equal(beside, alone.expand(8, -1, -1))
    return torch.cat([prompt[:, :part], alone], dim=1) if is_same else torch.empty(0)


def _fixed(draw: torch.Generator, shape: tuple[int, ...], span: ModelSpan) -> Tensor:
    """Return token ids for two dimensions, else numbers, which are the same on every machine: a random generator's integers are."""
    if len(shape) == 2:
        return torch.randint(0, span.vocab_size, shape, generator=draw)
    return (torch.randint(-127, 128, shape, generator=draw) / 64.0).to(span.dtype)


def _inputs(span: ModelSpan, count: int) -> Tensor:
    """Return trial inputs of `count` positions, the same at every call: token ids for the embedding, else hidden states."""
    generator = torch.Generator().manual_seed(count)
    if span.has_embedding:
        return torch.randint(0, span.vocab_size, (len(PADDING), count), generator=generator)
    return torch.randn(len(PADDING), count, span.width, generator=generator).to(span.dtype)


@dataclass(frozen=True)
class LoadedSpan:
    """Layers on one device, given by its number. `weights` are their reservations in ledgers, if the stage has its own."""

    device: int
    span: ModelSpan
    weights: tuple[Reservation, ...] = ()


@dataclass(eq=False)
class SpanPart:
    """Layers of a served span on one device. Made by `start`, ended by `close`."""

    loaded: LoadedSpan
    runner: StageRunner
    worker: Worker
    capability: Capability
    measure: Callable[[], Speeds]
    passes: Reservation
    equal_bits: str = ""  # what they cost, as a sentence; empty without --equal-bits

    def __post_init__(self) -> None:
        self.device = self.loaded.device
        self.span = self.loaded.span
        self.units = self.span.end - self.span.start  # number of units
        self._memory = [self.passes, *self.loaded.weights]
        self._closed = False
        self._loop, self._company = asyncio.get_running_loop(), asyncio.Event()
        self._shared_passes = 0
        self.worker.on_pass = self._record_pass

    def __repr__(self) -> str:
        return f"<SpanPart {self.span!r} on device {self.device}>"

    @classmethod
    async def start(cls, place: StageResources, loaded: LoadedSpan) -> SpanPart:
        """Try a loaded span, and measure it. Raises ExecutorDied, and LocalError if the device cannot compute it."""
        hardware, executor = place.hardware, place.executors[loaded.device]
        span, lent = loaded.span, hardware.lent[loaded.device]
        units = Span(span.start, span.end)
        cache_bytes = hardware.cache_tokens(units, lent) * max(1, span.planned_bytes_per_token(hardware.config.kv))
        capture, kv = hardware.config.capture != "off", hardware.config.kv
        bounds = RunnerConfig(cache_bytes=cache_bytes, capture=capture, kv=kv)
        runner = StageRunner(span, bounds, lent.throttle, lent.ledger)
        mtp = None
        if isinstance(span.reader, GuessingLayer):
            mtp = MtpGuesses(span.reader, lent.throttle, lent.ledger, capture=capture, kv=kv)
        longest = hardware.config.server.longest_chunk_tokens
        worker = Worker(runner, executor, longest_chunk_tokens=longest, mtp=mtp)
        async with contextlib.AsyncExitStack() as undo:  # a pause may cancel this in the middle
            pass_bytes = span.pass_bytes(RunnerConfig.prefill_positions, MAX_BATCH)
            if mtp is not None:
                pass_bytes += mtp.layer.block.pass_bytes(MAX_BATCH * LONGEST_SHARED, 0)
            passes = lent.ledger.count(Account.ACTIVATIONS, pass_bytes)
            undo.callback(passes.release)
            undo.push_async_callback(worker.close)
            await worker.start()
            if lent.device.kind != "cpu":
                await worker.call("try the span", lambda: try_span(runner))
            if runner.graphs is not None:
                await worker.call("try its graph", runner.graphs.prepare)
            await worker.call("find its bits", lambda: find_bits(runner))
            cost = ""
            if span.has_equal_rows:
                if not runner.bits:
                    raise LocalError(
                        f"--equal-bits: on this machine the bits of layers [{span.start}:{span.end}) depend on the company; "
                        "leave it out"
                    )
                cost = await worker.call("measure equal bits", lambda: cost_of_equal_bits(runner))
            measure = partial(measure_serving, runner, clock=place.host.clock.compute)
            lasting = not span.packings.at_once  # else a few units will do: all are measured again once packed
            at_first = partial(measure, few=not lasting)
            capability = await worker.call(
                "measure", lambda: place.measure(units.units, lent, at_first, lasting=lasting)
            )
            worker.expect(capability.speeds)
            undo.pop_all()
        return cls(loaded, runner, worker, capability, measure, passes, cost)

    @property
    def speeds(self) -> Speeds:
        """Speeds as measured, corrected by real work since."""
        return self.capability.speeds

    async def pack(self) -> bool:
        """Rearrange weights while sessions run. Returns whether the speeds are provisional, measured before this."""
        await asyncio.to_thread(self.span.packings.at_once.run, lambda: self._closed)
        return not self.capability.lasting

    async def pack_in_company(self) -> None:
        """Rearrange the layers that become slower for a lone session, once several sessions have shared passes for a
        while."""
        if self.span.packings.in_company:
            await self._company.wait()
            await asyncio.to_thread(self.span.packings.in_company.run, lambda: self._closed)

    async def measure_again(self) -> None:
        """Measure the speeds again after weights were rearranged. No session may compute meanwhile."""
        await self.worker.call("measure", lambda: self.capability.measure(self.measure))

    def _record_pass(self, phase: str, sessions: int, positions: int, units: int, seconds: float) -> None:
        """Note the speed of real work of a lone session, which is the announced speed. Short prompts do not count."""
        if sessions > 1:
            self._shared_passes += 1
            if self._shared_passes == COMPANY_PASSES:
                self._loop.call_soon_threadsafe(self._company.set)
        elif phase == DECODE:
            self.capability.record("decode_units_per_s", seconds / units)
        elif positions == 2:
            self.capability.record("pair_units_per_s", seconds / (units * positions))
        elif positions >= PREFILL_POSITIONS:
            self.capability.record("prefill_units_per_s", seconds / (units * positions))

    def stop_packing(self) -> None:
        """Stop rearranging weights for faster kernels, after the layer in progress."""
        self._closed = True

    async def close(self, *, keep_span: bool = False) -> None:
        """Stop computing and free all memory of the part. The weights stay if `keep_span` is true."""
        self.stop_packing()
        await self.worker.close()
        if self.worker.mtp is not None:
            self.worker.mtp.close_all()
        self.runner.close_all(keep_span=keep_span)
        for reservation in self._memory:
            reservation.release()


@dataclass(frozen=True)
class RetainedSpan:
    """Weights of a whole span in host memory: its replicas in parts, and the hardware that computed them.

    `memory` is their reservation in the host's ledger, until `release` or until they are back on their devices.
    """

    hardware: Hardware
    replicas: Sequence[Sequence[LoadedSpan]]
    memory: Reservation

    def __repr__(self) -> str:
        return f"<RetainedSpan {self.replicas!r}>"

    @classmethod
    def of(
        cls, hardware: Hardware, replicas: Sequence[Sequence[LoadedSpan]], host: MemoryLedger
    ) -> RetainedSpan | None:
        """Move an unused span into host memory; None if its weights cannot move back, and then they are freed: quantised ones, and
        experts of which some are in the host's memory anyway."""
        spans = [part.span for replica in replicas for part in replica]
        if any(span.quantization is not None or span.split_experts for span in spans):
            for span in spans:
                span.close()
            return None
        for span in spans:
            span.move_to(torch.device("cpu"))
        return cls(hardware, replicas, host.count(Account.WEIGHTS, sum(span.weight_bytes for span in spans)))

    @property
    def units(self) -> Span:
        """Layers [start, end) whose weights are kept in host memory."""
        return Span(self.replicas[0][0].span.start, self.replicas[0][-1].span.end)

    def release(self) -> None:
        """Free the weights in host memory, and their reservation."""
        for replica in self.replicas:
            for part in replica:
                part.span.close()
        self.memory.release()
