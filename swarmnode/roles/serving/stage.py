"""One span of a model, loaded and served: what a node does between choosing units and leaving them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from swarmnode.compute.device import Device, probe_device, set_threads, usable_cores
from swarmnode.compute.executor import Executor
from swarmnode.compute.memory import (
    UnitSizes,
    cache_tokens_that_fit,
    describe_fit,
    format_bytes,
    most_anywhere,
    training_sizes,
    unit_sizes,
    units_that_fit,
)
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan, load_span, prepare_span
from swarmnode.compute.serving.grammar import GrammarCompiler
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner
from swarmnode.compute.serving.trial import try_span
from swarmnode.compute.speed import PREFILL_POSITIONS, Speeds, measure_serving
from swarmnode.compute.throttle import Throttle
from swarmnode.config import StageConfig
from swarmnode.errors import LocalError, UsageError
from swarmnode.ledger import Account, MemoryLedger, Reservation
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.clock import MACHINE_CLOCK, Clock
from swarmnode.net.tasks import Tasks
from swarmnode.plan.view import Span as Units
from swarmnode.roles.host import Host
from swarmnode.roles.measuring.capability import Capability, Conditions, SpeedCache, speeds_section
from swarmnode.roles.measuring.meters import DECODE
from swarmnode.roles.question_server import QuestionServer
from swarmnode.roles.serving.audits.audit_server import Author, audit_server
from swarmnode.roles.serving.grammars import Grammars
from swarmnode.roles.serving.kept_span import KeptSpan
from swarmnode.roles.serving.server import StageServer
from swarmnode.roles.serving.worker import Worker
from swarmnode.swarm.records.sections import Machine, Section, ServingLoad

MAX_BATCH = 64  # rows of a pass that the ledger counts with
MEMORY_SHARE = 0.8  # of what is free: a volunteer goes on using the machine
SPEEDS_FILE = "speeds.json"


@dataclass(frozen=True)
class Hardware:
    """What this machine can hold of one model. Made by `probe`, before anything is loaded."""

    device: Device
    dtype: torch.dtype
    quantize: str
    memory_bytes: int
    sizes: UnitSizes
    config: StageConfig
    trains: bool = False
    folder: Path | None = None  # with the model's tokenizer
    ledger: MemoryLedger = field(default_factory=MemoryLedger, compare=False)  # of the device
    throttle: Throttle = field(default_factory=Throttle, compare=False)  # of all that is computed on it

    def __repr__(self) -> str:
        return f"<Hardware {self.device}, {self.capacity_units} units in {self.dtype}>"

    @classmethod
    def probe(
        cls,
        checkpoint: Checkpoint,
        config: StageConfig,
        *,
        trains: bool = False,
        host: MemoryLedger | None = None,
        clock: Clock = MACHINE_CLOCK,
    ) -> Hardware:
        """Find out, and give the ledger of the `host`, which is the device's own where that is the CPU, its limit.

        Raises UsageError on words that mean nothing, LocalError where the device is not here, CheckpointError where the model
        cannot be split.
        """
        config.check()
        if trains and (config.quantize != "none" or config.dtype not in ("auto", "float32")):
            raise UsageError("training keeps its weights in float32: leave --quantize and --dtype alone")
        device = probe_device(config.device)
        set_threads(config.threads)
        dtype = torch.float32 if trains else device.dtype_for(checkpoint.dtype, config.dtype)
        sizes = training_sizes(checkpoint) if trains else unit_sizes(checkpoint, dtype=dtype, quantize=config.quantize)
        memory_bytes = config.memory_bytes or int(device.free_bytes * MEMORY_SHARE)
        if not device.shared and memory_bytes > device.free_bytes:
            wanted, free = format_bytes(memory_bytes), format_bytes(device.free_bytes)
            raise LocalError(f"--memory {wanted}: {device.name} has {free} free now; lend less, or end what uses it")
        ledger = _ledger_of(device, memory_bytes, host or MemoryLedger())
        slowed = config.throttle_units_per_s or math.inf
        throttle = Throttle(slowed, config.share, clock=clock.compute, sleep=clock.hold_up)
        lent = dtype, config.quantize, memory_bytes, sizes, config, trains
        hardware = cls(device, *lent, checkpoint.path, ledger, throttle)
        if hardware.capacity_units == 0:
            raise LocalError(
                f"{memory_bytes / 1e6:.0f} MB are not enough for one unit of this model "
                + ("with its gradients and optimiser" if trains else f"with a cache of {config.cache_tokens} tokens")
                + "; lend more with --memory"
            )
        return hardware

    @property
    def number_format(self) -> str:
        """As others see it: replicas of one format compute the same but for the last bits."""
        name = str(self.dtype).removeprefix("torch.")
        return name if self.quantize == "none" else f"{name}-{self.quantize}"

    @property
    def device_name(self) -> str:
        """As others see it."""
        return self.device.name[:48]

    def machine(self, home: Path) -> dict[str, Any]:
        """What was found, for scripts; `home` is the folder whose disk keeps the weights."""
        return {
            "device": self.device_name,
            "memory_bytes": self.memory_bytes,
            "cpu_cores": usable_cores(),
            "disk_free_bytes": shutil.disk_usage(home).free,
            "capacity_units": self.capacity_units,
        }

    @cached_property
    def capacity_units(self) -> int:
        """How many units fit wherever in the model the span lies: the least over all places."""
        return self.capacity_of(self.memory_bytes)

    def capacity_of(self, memory_bytes: int) -> int:
        """The same of another machine that lends so much."""
        return most_anywhere(self.sizes, memory_bytes, self.config.cache_tokens)

    def _fits(self, units: Units) -> bool:
        fitting = units_that_fit(self.sizes, self.memory_bytes, self.config.cache_tokens, start=units.start)
        return fitting >= units.units

    def check(self, units: Units) -> Units:
        """The span that the user fixed, if it can be held. Raises UsageError, LocalError."""
        if units.end > len(self.sizes.weight_bytes):
            raise UsageError(
                f"--span {units.start}:{units.end}: the model has units 0 to {len(self.sizes.weight_bytes) - 1}"
            )
        if not self._fits(units):
            need_bytes = self.sizes.need_bytes(units.start, units.end, self.config.cache_tokens)
            raise LocalError(
                f"units {units} need {need_bytes / 1e6:.0f} MB and some room; {self.memory_bytes / 1e6:.0f} MB are lent"
            )
        return units

    def cache_tokens(self, units: Units) -> int:
        """Positions that the cache beside these units may hold."""
        if self.trains:
            return self.config.cache_tokens
        left = cache_tokens_that_fit(self.sizes, self.memory_bytes, units.start, units.end)
        return min(left, self.config.max_cache_tokens) if left else self.config.max_cache_tokens

    def conditions(self, swarm_id: bytes, units: int) -> Conditions:
        """What speeds measured now on so many units hold for."""
        return Conditions(
            model=swarm_id.hex(),
            device=self.device.name,
            memory_bytes=self.device.total_bytes,
            number_format=f"{self.dtype} {self.quantize}",
            threads=torch.get_num_threads(),
            units=units,
            throttle=self.config.throttle_units_per_s or 0.0,
            share=self.config.share,
        )

    def sections(self, host: Host) -> tuple[Section, ...]:
        """What the announcement says of this machine before a span is loaded: speeds are those of the last span held."""
        conditions = self.conditions(host.swarm.id, self.capacity_units)
        known = SpeedCache(host.config.home / SPEEDS_FILE, now=host.clock.unix).nearest(conditions)
        machine = Machine(device=self.device_name, number_format=self.number_format, memory_bytes=self.memory_bytes)
        return machine, speeds_section(known)

    def prepare(self, outline: Checkpoint, units: Units) -> None:
        """Do what loading a span takes besides its weights. Raises CheckpointError where the family cannot be split."""
        prepare_span(outline, units.start, units.end, device=self.device.torch_device, dtype=self.dtype)

    def describe(self, units: Units) -> str:
        """As in "fits 12 of 34 units: 5.1 GB weights + 1.2 GB cache for 8192 tokens"."""
        if self.trains:
            size = format_bytes(self.sizes.need_bytes(units.start, units.end, 0))
            return f"{units.units} of {len(self.sizes.weight_bytes)} units: {size} weights, gradients and optimiser"
        return describe_fit(self.sizes, units.start, units.end, self.cache_tokens(units))


def _ledger_of(device: Device, memory_bytes: int, host: MemoryLedger) -> MemoryLedger:
    """The device's ledger; from now on both have their limits."""
    if device.shared:
        host.limit_bytes = memory_bytes
        return host
    host.limit_bytes = int(probe_device("cpu").free_bytes * MEMORY_SHARE)
    return MemoryLedger(memory_bytes, name="device")


class ServingStage:
    """A loaded span, what its sessions want computed, and its server. Made by `load`, ended by `close`."""

    def __init__(
        self,
        runner: StageRunner,
        worker: Worker,
        server: StageServer,
        statements: QuestionServer,
        capability: Capability,
        memory: Sequence[Reservation],
        tasks: Tasks,
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._worker = worker
        self._server = server
        self._statements = statements
        self._capability = capability
        self._closed = False
        self._tasks = tasks
        worker.on_lone_pass = self._note_pass

    def __repr__(self) -> str:
        return f"<ServingStage {self._server!r}>"

    @classmethod
    async def load(
        cls, host: Host, checkpoint: Checkpoint, hardware: Hardware, units: Units, executor: Executor
    ) -> ServingStage:
        """Load a span whose weights are here, measure it, and serve. Raises CheckpointError, LocalError."""
        weights = hardware.ledger.count(Account.WEIGHTS, hardware.sizes.need_bytes(units.start, units.end, 0))
        try:
            span = await asyncio.to_thread(
                load_span,
                checkpoint,
                units.start,
                units.end,
                device=hardware.device.torch_device,
                dtype=hardware.dtype,
                quantize=hardware.quantize,
            )
            weights.count(span.weight_bytes)  # tied ones are here once
            return await cls.serve(host, span, hardware, executor, weights)
        except BaseException:
            weights.release()
            raise

    @classmethod
    async def take_up(cls, host: Host, kept: KeptSpan, hardware: Hardware, executor: Executor) -> ServingStage:
        """Serve a span that was kept in the host's memory. Raises ExecutorDied."""
        weights = kept.into(hardware.ledger)
        try:
            await asyncio.to_thread(kept.span.move_to, hardware.device.torch_device)
            return await cls.serve(host, kept.span, hardware, executor, weights)
        except BaseException:
            weights.release()
            raise

    @classmethod
    async def serve(
        cls,
        host: Host,
        span: ModelSpan,
        hardware: Hardware,
        executor: Executor,
        weights: Reservation | None = None,
    ) -> ServingStage:
        """Serve a span that is loaded, and whose `weights` are in the ledger, if they are its own. Raises ExecutorDied, and
        LocalError where the device cannot compute it."""
        passes = hardware.ledger.count(Account.ACTIVATIONS, span.pass_bytes(RunnerConfig.prefill_positions, MAX_BATCH))
        per_token = max(1, span.cache_bytes_per_token)
        clock = host.clock
        cache_bytes = hardware.cache_tokens(Units(span.start, span.end)) * per_token
        bounds = RunnerConfig(cache_bytes=cache_bytes, capture=hardware.config.capture != "off")
        runner = StageRunner(span, bounds, hardware.throttle, hardware.ledger)
        worker = Worker(runner, executor, chunk_tokens=hardware.config.server.prefill_chunk_tokens)
        async with contextlib.AsyncExitStack() as undo:  # whoever pauses gives a start up in its middle
            undo.callback(passes.release)
            undo.push_async_callback(worker.close)
            await worker.start()
            if hardware.device.kind != "cpu":
                await worker.call("try the span", lambda: try_span(runner))
            cache = SpeedCache(host.config.home / SPEEDS_FILE, now=clock.unix)
            conditions = hardware.conditions(host.swarm.id, span.end - span.start)
            measure = partial(measure_serving, runner, clock=clock.compute)
            lasting = not span.packing  # else a few units will do: all is measured again once they are packed
            at_first = partial(measure, few=not lasting)
            capability = await worker.call(
                "measure", lambda: Capability.of(conditions, cache, at_first, lasting=lasting, clock=clock.monotonic)
            )
            worker.expect(capability.speeds)
            compiler = GrammarCompiler(hardware.folder, span.vocab_size) if span.has_head and hardware.folder else None
            server = StageServer(
                host.network,
                host.hello,
                worker,
                hardware.config.server,
                host.link_config,
                host.observed_latency,
                completed=host.completed,
                weight_of=lambda client: host.weight_of(client),
                on_neighbour_lost=host.lost_neighbour,
                decisions=host.decisions,
                grammars=Grammars(compiler, host.link_config.ledger, hardware.config.server) if compiler else None,
            )
            speeds, units = capability.speeds, span.end - span.start
            if speeds.decode_units_per_s > 0 and speeds.prefill_units_per_s > 0:
                step_s, position_s = units / speeds.decode_units_per_s, units / speeds.prefill_units_per_s
                server.watch.expect(step_s=step_s, position_s=position_s)
            undo.push_async_callback(server.close)
            await server.start()
            author = Author(host.peer_id, host.swarm.id, hardware.number_format, host.identity.sign)
            statements = audit_server(host.network, host.hello, host.link_config, author, server.session)
            undo.push_async_callback(statements.close)
            await statements.start()
            undo.pop_all()
            gc.freeze()  # what libraries made is here to stay: to look through it again would keep every session waiting
        memory = [passes] if weights is None else [passes, weights]
        tasks = Tasks("serving stage", on_crash=host.supervisor.ends_peer)
        stage = cls(runner, worker, server, statements, capability, memory, tasks)
        if span.packing:
            stage._tasks.spawn(stage._pack(measure), "pack")
        return stage

    async def _pack(self, measure: Callable[[], Speeds]) -> None:
        """Sessions go on beside it. What was measured before does not last; it is measured again if nobody computes now, else
        real work will show it."""
        await asyncio.to_thread(self._runner.span.packing.run, lambda: self._closed)
        if not self._capability.lasting and not self._server.load:
            await self._worker.call("measure", lambda: self._capability.measure(measure))

    @property
    def bound(self) -> bool:
        """Whether these units hold something that others do not have."""
        return False

    def sections(self) -> tuple[Section, ...]:
        """What the announcement says of this stage."""
        per_token = max(1, self._runner.span.cache_bytes_per_token)
        free_tokens = self._server.free_cache_bytes // per_token
        return self._capability.section(), ServingLoad(sessions=self._server.load, cache_tokens_free=free_tokens)

    def _note_pass(self, phase: str, positions: int, units: int, seconds: float) -> None:
        """Real work of one session alone is what announced speeds are of. Short prompts tell little."""
        if phase == DECODE:
            self._capability.note("decode_units_per_s", seconds / units)
        elif positions >= PREFILL_POSITIONS:
            self._capability.note("prefill_units_per_s", seconds / (units * positions))

    def readings(self) -> Readings:
        """What Prometheus may know of this stage."""
        span = self._runner.span
        yield Reading(table.SPEED, self._capability.speeds.decode_units_per_s, (f"{span.start}:{span.end}",))
        yield from self._server.readings()

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, and let the sessions move to other peers."""
        await self._server.drain(timeout_s)

    async def finish(self) -> None:
        """Take nothing new, and wait until the last session has ended."""
        await self._server.finish()

    def take_on(self) -> None:
        """Take sessions again, after all."""
        self._server.take_on()

    def keep(self, host: MemoryLedger) -> KeptSpan | None:
        """What a closed stage served, in the memory of the host; None where it cannot be there."""
        return KeptSpan.of(self._runner.span, host)

    async def close(self, *, keep_span: bool = False) -> None:
        """Free everything, but the span where it is to be kept."""
        self._closed = True  # a thread ends with the layer that it packs
        await self._tasks.close()
        await self._statements.close()
        await self._server.close()
        await self._worker.close()
        self._runner.close_all(keep_span=keep_span)
        gc.unfreeze()  # what this stage was made of may be collected
        for reservation in self._memory:
            reservation.release()
