"""A swarm of a toy model on the fake network: the real servers and clients, in virtual time, with arithmetic for layers.

Every unit of the model adds up what it has seen, so each token depends on every position before it and on the cache of
every unit: one position too many, too few or twice changes everything that follows.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Want
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.compute.serving.cache import CacheBudget
from swarmnode.compute.serving.sampler import Drawn
from swarmnode.config import ClientConfig, ServerConfig
from swarmnode.errors import NoRoute
from swarmnode.ledger import MemoryLedger
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Switchboard
from swarmnode.measuring.meters import SERVE, ClientMeter, StageMeter
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.memory.medium import Path
from swarmnode.net.memory.network import FakeWorld
from swarmnode.peer.paths import ObservedLatency
from swarmnode.plan.routes.routing import SessionSize
from swarmnode.plan.serving.scheduler import PassCost
from swarmnode.plan.view import Span
from swarmnode.serving.client.client_session import SESSION_PROTOCOL, ClientSession
from swarmnode.serving.client.generation import GenerateOptions, RingStream
from swarmnode.serving.client.router import Route, Router
from swarmnode.serving.job import ForwardHidden, Job, JobResult, Pass, Sample, drop_from
from swarmnode.serving.pipeline import Pipeline
from swarmnode.serving.served_adapters import Grammars, StageAdapters
from swarmnode.serving.server import StageServer
from swarmnode.serving.worker import Running
from tests.peer.toy_peer import HELLO, ToyPeer

MODULUS = 997
STEP_S = 0.01
UNITS = 4


def step(sums: list[int], first_unit: int, value: int) -> int:
    """One position through some units, whose caches are `sums`."""
    for index, held in enumerate(sums):
        value = sums[index] = (held + value + first_unit + index) % MODULUS
    return value


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """What the whole model draws after a prompt."""
    sums, tokens = [0] * UNITS, list(prompt)
    for position in range(len(prompt) + count - 1):
        drawn = step(sums, 0, tokens[position])
        if position + 1 >= len(prompt):
            tokens.append(drawn)
    return tokens[len(prompt) :]


def link_config() -> LinkConfig:
    """Links that measure virtual time."""
    return LinkConfig(clock=asyncio.get_running_loop().time)


def unpack(info: TensorInfo, payload: Buffer) -> list[int]:
    """Ids, or hidden states of width 1."""
    letter = "q" if info.dtype == DType.INT64 else "f"
    return [int(value) for value in struct.unpack(f"<{info.shape[1]}{letter}", payload)]


def pack(values: Sequence[int]) -> tuple[TensorInfo, bytes]:
    return TensorInfo(Codec.NONE, DType.FLOAT32, (1, len(values), 1)), struct.pack(f"<{len(values)}f", *values)


class ToyWorker:
    """Stands in for `Worker`: one job at a time, `step_s` each."""

    def __init__(self, start: int, end: int, cache_bytes: int) -> None:
        self.runner: Any = SimpleNamespace(
            span=SimpleNamespace(
                start=start,
                end=end,
                width=1,
                vocab_size=MODULUS,
                position_limit=None,
                family=SimpleNamespace(has_whole_copies=False),
            ),
            pool=SimpleNamespace(
                budget=CacheBudget(cache_bytes),
                reachable=lambda _session, _held, length: length,
                positions_in=lambda free_bytes: free_bytes // max(1, end - start),
            ),
            reservation_bytes=lambda rows, length, start, end: rows * length * (end - start),
            fork=self.fork,
        )
        self.scheduler = SimpleNamespace(cost=PassCost())
        self.meter = StageMeter(Span(start, end), SERVE)
        self.clock = asyncio.get_running_loop().time
        self.caches: dict[int, tuple[int, list[int]]] = {}  # first unit, sums
        self.lengths: dict[int, int] = {}
        self.held: dict[int, list[list[int]]] = {}  # the sums before each position
        self.positions = 0
        self.dropped = 0  # positions that were taken back before they were computed
        self.step_s = STEP_S
        self._jobs: deque[Job] = deque()

    def open(self, key: int, *, start: int, end: int, **_reservation: object) -> None:
        self.caches[key], self.lengths[key], self.held[key] = (start, [0] * (end - start)), 0, []

    def extend(self, key: int, max_length: int) -> None:
        pass

    def begin(self, _key: int, copy: Callable[[], None]) -> None:
        copy()

    def fork(self, source: int, key: int, length: int) -> None:
        (first_unit, sums), held = self.caches[source], self.held[source]
        assert 0 < length <= len(held)
        self.caches[key] = (first_unit, list(sums if length == len(held) else held[length]))
        self.held[key], self.lengths[key] = [list(one) for one in held[:length]], length

    def forget(self, key: int) -> None:
        del self.caches[key], self.lengths[key], self.held[key]

    @property
    def running(self) -> Running:
        """Whatever it does, it has been doing."""
        return Running(math.inf, serving=True)

    @property
    def queued(self) -> int:
        return len(self._jobs)

    def submit(self, job: Job) -> None:
        if job.back_to is not None:
            own = deque(one for one in self._jobs if one.session == job.session)
            self.dropped += drop_from(own, job.back_to)
            self._jobs = deque([*(one for one in self._jobs if one.session != job.session), *own])
        self._jobs.append(job)
        asyncio.get_running_loop().call_later(self.step_s, self._run, self.step_s)

    def _run(self, took_s: float) -> None:
        if not self._jobs:
            return
        job, ended_s = self._jobs.popleft(), asyncio.get_running_loop().time()
        if job.session in self.caches:
            job.done(job, self._result(job), Pass(ended_s - took_s, ended_s, 1))

    def _result(self, job: Job) -> JobResult:
        first_unit, sums = self.caches[job.session]
        held = self.held[job.session]
        if job.cut_to is not None and job.cut_to < len(held):
            sums[:], self.lengths[job.session] = held[job.cut_to], job.cut_to
            del held[job.cut_to :]
        assert job.start == self.lengths[job.session], "a gap or an overlap reached the worker"
        self.lengths[job.session] = job.end
        values = [value for info, payload in job.parts for value in unpack(info, payload)][job.skip :]
        self.positions += len(values)
        outputs = []
        for value in values:
            held.append(list(sums))
            outputs.append(step(sums, first_unit, value))
        if isinstance(job.then, ForwardHidden):
            return JobResult(tensors=(pack(outputs),))
        if isinstance(job.then, Sample):
            sampler, begin = job.then.sampler, job.start + 1
            first = max(begin, job.then.first)

            def draw(position: int) -> Drawn:
                token = outputs[position - begin]
                return Drawn(position, (token,), sampler.is_final(position, token))

            return JobResult(tokens=tuple(sampler.drawn_after(job.guesses, first, draw, job.end + 1 - first)))
        return JobResult(tensors=(pack(outputs[-1:]),)) if job.want == Want.LAST else JobResult()


def stage_server(peer: ToyPeer, pipelines: Sequence[Pipeline], config: ServerConfig) -> StageServer:
    """A server that has neither grammars nor adapters."""
    links = peer.link_config
    adapters = StageAdapters(None, (), config, on_crash=links.supervisor.ends_conversation)
    return StageServer(peer, pipelines, config, grammars=Grammars(None, links.ledger, config), adapters=adapters)


class Volunteer:
    """A peer that serves some units."""

    def __init__(self, world: FakeWorld, start: int, end: int, cache_bytes: int, config: ServerConfig) -> None:
        self.start, self.end = start, end
        self.network = world.join()
        self.peer = self.network.peer_id
        self.worker = ToyWorker(start, end, cache_bytes)
        self.ledger = MemoryLedger()
        link = replace(link_config(), ledger=self.ledger)
        pipeline = Pipeline([self.worker], self.ledger)  # type: ignore[list-item]
        self.server = stage_server(ToyPeer(self.network, link), [pipeline], config)


class ToyRouter(Router):
    """Replicas in the order in which they joined, but rather those that are kept."""

    def __init__(self, volunteers: list[Volunteer]) -> None:
        self._volunteers = volunteers
        self.suspected: list[PeerId] = []
        self.most_drafts = 0
        self.observed_latency = ObservedLatency(clock=asyncio.get_running_loop().time)

    def route(self, avoid: frozenset[PeerId], retain: Sequence[HopSpec], size: SessionSize) -> Route:
        kept = {hop.peer for hop in retain}
        usable = [one for one in self._volunteers if one.peer not in avoid and one.peer not in self.suspected]
        usable.sort(key=lambda one: one.peer not in kept)
        hops: list[HopSpec] = []
        while (unit := hops[-1].end if hops else 0) < UNITS:
            chosen = next((one for one in usable if one.start == unit), None)
            if chosen is None:
                raise NoRoute(f"nobody serves unit {unit}")
            hops.append(HopSpec(chosen.peer, chosen.start, chosen.end))
        return tuple(hops)

    def suspect(self, peer: PeerId, reason: str) -> None:
        self.suspected.append(peer)

    def drafts(self, route: Route) -> int:
        return self.most_drafts

    async def changed(self) -> None:
        await asyncio.Event().wait()


class ToySwarm:
    """Volunteers and one client. Made by `start`."""

    def __init__(self, spans: Iterable[tuple[int, int]], cache_bytes: int, config: ServerConfig) -> None:
        self.world = FakeWorld(seed=11)
        self.world.default_path = Path(latency_s=0.01)
        self.client = self.world.join()
        self.switchboard = Switchboard(
            self.client, SESSION_PROTOCOL, HELLO, link_config(), on_peer_lost=lambda error: self._note_lost(error.peer)
        )
        self.volunteers = [Volunteer(self.world, start, end, cache_bytes, config) for start, end in spans]
        self.router = ToyRouter(self.volunteers)
        self.meter = ClientMeter()
        self.config = ClientConfig(patience_s=5.0, prompt_chunk_tokens=3)

    @classmethod
    async def start(
        cls,
        *spans: tuple[int, int],
        cache_bytes: int = 10_000,
        config: ServerConfig = ServerConfig(),
    ) -> ToySwarm:
        swarm = cls(spans, cache_bytes, config)
        for one in swarm.volunteers:
            await one.server.start()
            assert await one.network.connect(await swarm.client.addresses(), timeout_s=1)
        return swarm

    def ring(self, prompt: Sequence[int], count: int, **options: Any) -> RingStream:
        wanted, clock = GenerateOptions(max_new_tokens=count, **options), asyncio.get_running_loop().time
        spec, config = wanted.spec(prompt), self.config
        session = ClientSession(self.switchboard, self.router, spec, config, meter=self.meter, clock=clock)
        return RingStream(session, wanted)

    def _note_lost(self, peer: PeerId | None) -> None:
        if peer is not None and peer not in self.router.suspected:
            self.router.suspect(peer, "PEER_LOST")

    @property
    def loads(self) -> list[int]:
        """Sessions that each volunteer holds; each has a cache, and no cache is left without one."""
        assert all(len(one.worker.caches) == one.server.load for one in self.volunteers)
        return [one.server.load for one in self.volunteers]
