"""Serving stage: one span of a model, from loading it until the node leaves its layers.

Audit server: a hop's signed statements on its sessions, for peers that know a session's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swarmnode.codec.audit_messages import AUDIT_PROTOCOL, MAX_SKETCHED, GetStatement, StatementReply
from swarmnode.codec.body import MAX_DRAFTS
from swarmnode.codec.messages import Error, Open
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.grammar import GrammarCompiler
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig
from swarmnode.compute.serving.sketch import digests, sketch, sketch_bytes
from swarmnode.errors import ErrorCode, PrecisionError
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.measuring.capability import in_sequence, serving_section
from swarmnode.measuring.hardware import Hardware, StageResources
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.questions import Answer, LocalPeer, QuestionServer
from swarmnode.plan.spans.devices import DevicePart
from swarmnode.plan.view import Span as Units
from swarmnode.serving.drafting.model_drafter import DraftModel
from swarmnode.serving.drafting.proposers import Proposers
from swarmnode.serving.link_codecs import codec_rules_of
from swarmnode.serving.pipeline import Pipeline
from swarmnode.serving.served_adapters import Grammars, StageAdapters
from swarmnode.serving.server import StageServer
from swarmnode.serving.session.opening import units_of
from swarmnode.serving.session.session import StageSession
from swarmnode.serving.session.session_streams import Conveyed
from swarmnode.serving.span_part import LoadedSpan, RetainedSpan, SpanPart
from swarmnode.serving.stage import Stage
from swarmnode.swarm.records.announcement import Section, ServingLoad
from swarmnode.swarm.records.signed import Sign
from swarmnode.swarm.records.statement import Edge, Statement, sign_statement

QUESTIONS = 8  # answered for each MAX_SKETCHED positions of a session; an audit asks two, for digests and for sketches
AT_ONCE = 2  # each answer hashes all that the session carried


@dataclass(frozen=True)
class Author:
    """Author of statements: its peer id, swarm, number format and signing function."""

    peer: PeerId
    swarm: bytes
    number_format: str
    sign: Sign


def audit_server(peer: LocalPeer, author: Author, find: Callable[[bytes], StageSession | None]) -> QuestionServer:
    """Make the server that answers questions about the sessions that `find` returns.

    It answers NO_SESSION for an unknown session, INVALID_REQUEST for positions that were not computed or are not kept, and after
    `QUESTIONS` questions for each MAX_SKETCHED positions of the session. It makes AT_ONCE answers at a time.
    """
    making = asyncio.Semaphore(AT_ONCE)

    async def answer(_asker: Claimant, question: GetStatement) -> Answer:
        session = find(question.session)
        if session is None:
            return Answer(Error(ErrorCode.NO_SESSION))
        opened, transcript = session.opened, session.transcript
        received, sent = transcript.received.until(question.length), transcript.sent.until(question.length)
        told = transcript.sent_tokens
        is_last = opened.index + 1 == len(opened.route)
        is_there = question.first + question.count <= min(received.length, told.length if is_last else sent.length)
        if not is_there or transcript.questions >= QUESTIONS * (1 + transcript.received.length // MAX_SKETCHED):
            return Answer(Error(ErrorCode.INVALID_REQUEST))
        transcript.questions += 1
        states = all(edge.is_by_position for edge in (received, sent))
        bits = session.pipeline.bits_of(session.key) if states else b""
        async with making:
            statement, payload = await asyncio.to_thread(_state, author, question, opened, received, sent, told, bits)
        return Answer(StatementReply(statement), (payload,))

    return QuestionServer(peer, AUDIT_PROTOCOL, GetStatement, answer)


def _state(
    author: Author,
    question: GetStatement,
    opened: Open,
    received: Conveyed,
    sent: Conveyed,
    sent_tokens: Edge,
    bits: bytes,
) -> tuple[bytes, bytes]:
    """Return the signed statement of a hop's work that answers `question`, and the sketches of its inputs and outputs, or their
    digests if it asks for them and the hop has computed in the class `bits`."""
    sketched = [edge for edge in (received, sent) if edge.entries and not edge.is_ids]
    hidden = (edge.hidden(question.first, question.count) for edge in sketched)
    if question.digests and bits:
        payload = b"".join(digests(hidden_TH, question.seed).numpy().tobytes() for hidden_TH in hidden)
    else:
        payload = b"".join(sketch_bytes(sketch(hidden_TH, question.seed)) for hidden_TH in hidden)
    start, end = units_of(opened)
    statement = Statement(
        swarm=author.swarm,
        peer=author.peer,
        session=question.session,
        start=start,
        end=end,
        number_format=author.number_format,
        codec=sent.codec,
        seed=question.seed,
        first=question.first,
        count=question.count,
        received=received.edge(),
        sent=sent.edge() if sent.entries else sent_tokens,
        sketches=hashlib.sha256(payload).digest(),
        bits=bits,
    )
    return sign_statement(statement, author.sign), payload


log = logging.getLogger(__name__)

Replica = Sequence[SpanPart]


@dataclass(eq=False)
class ServingStage(Stage):
    """Replicas of a span, each in parts on its own devices, and their server. Made by `load` or `restore`, ended by `close`."""

    hardware: Hardware
    replicas: Sequence[Replica]
    server: StageServer
    statements: QuestionServer
    tasks: Tasks
    draft: DraftModel | None = None

    def __post_init__(self) -> None:
        self._parts = [part for replica in self.replicas for part in replica]
        for part in self._parts:
            if any(part.span.packings):
                self.tasks.spawn(self._pack(part), "pack")

    def __repr__(self) -> str:
        return f"<ServingStage {self.server!r}>"

    @classmethod
    async def load(cls, place: StageResources, checkpoint: Checkpoint, units: Units) -> ServingStage:
        """Load a span whose weights are on disk, measure it, and serve it.

        If its numbers overflow, it is loaded again in float32. Raises CheckpointError, and LocalError if a device
        cannot compute it.
        """
        try:
            return await cls._load(place, checkpoint, units)
        except PrecisionError as error:
            wider = place.hardware.in_float32(checkpoint)
            if wider is None:
                raise
            log.warning("%s: loading them again in float32", error)
        return await cls._load(replace(place, hardware=wider), checkpoint, units)

    @classmethod
    async def _load(cls, place: StageResources, checkpoint: Checkpoint, units: Units) -> ServingStage:
        hardware = place.hardware
        layout = hardware.lay_out(units, place.speed_cache, place.host.swarm.id)
        async with contextlib.AsyncExitStack() as undo:
            host = place.host.link_config.ledger
            loaded = [
                [await _load_part(checkpoint, hardware, host, part, undo) for part in replica] for replica in layout
            ]
            stage = await cls.serve(place, loaded)
            undo.pop_all()
        return stage

    @classmethod
    async def restore(cls, place: StageResources, retained: RetainedSpan) -> ServingStage:
        """Serve a span that was kept in host memory. Raises ExecutorDied or LocalError, as `serve` does."""
        async with contextlib.AsyncExitStack() as undo:
            loaded = [
                [await _move_back(part, retained.hardware, undo) for part in replica] for replica in retained.replicas
            ]
            retained.memory.release()
            stage = await cls.serve(replace(place, hardware=retained.hardware), loaded)
            undo.pop_all()
        return stage

    @classmethod
    async def serve(cls, place: StageResources, loaded: Sequence[Sequence[LoadedSpan]]) -> ServingStage:
        """Serve replicas of a span whose parts are loaded. Raises ExecutorDied, and LocalError if a device cannot
        compute it."""
        host, hardware, config = place.host, place.hardware, place.hardware.config.server
        async with contextlib.AsyncExitStack() as undo:  # a pause may cancel this in the middle
            replicas: list[list[SpanPart]] = []
            for spans in loaded:
                replicas.append([])
                for one in spans:
                    part = await SpanPart.start(place, one)
                    undo.push_async_callback(part.close, keep_span=True)
                    replicas[-1].append(part)
            draft = await _load_draft(place, loaded[0][0].span)
            if draft is not None:
                undo.push_async_callback(draft.close)
            span = loaded[0][-1].span
            compiler = GrammarCompiler(hardware.folder, span.vocab_size) if span.has_head and hardware.folder else None
            places = [(part.worker, hardware.lent[part.device].ledger) for replica in replicas for part in replica]
            server = StageServer(
                host,
                [_pipeline(replica, host.link_config.ledger) for replica in replicas],
                config,
                grammars=Grammars(compiler, host.link_config.ledger, config),
                adapters=StageAdapters(
                    place.adapters,
                    places,
                    config,
                    on_crash=host.supervisor.ends_conversation,
                    host=host.link_config.ledger,
                ),
                codec_rules=codec_rules_of(host, span.dtype),
                drafting=Proposers(host.directory.peers, lambda: server, draft, host.clock.compute),
            )
            undo.push_async_callback(server.close)
            await server.start()
            author = Author(host.peer_id, host.swarm.id, hardware.number_format, host.identity.sign)
            statements = audit_server(host, author, server.session)
            undo.push_async_callback(statements.close)
            await statements.start()
            undo.pop_all()
            gc.freeze()  # library objects stay for good: collecting over them again would delay every session
        tasks = Tasks("serving stage", on_crash=host.supervisor.ends_peer)
        return cls(hardware, replicas, server, statements, tasks, draft)

    async def _pack(self, part: SpanPart) -> None:
        """Rearrange the weights of a part while sessions run.

        Afterwards the part is measured again if its speed was provisional and no session is here. Else real work will
        show its speed.
        """
        if await part.pack() and not self.server.load:
            await part.measure_again()
        await part.pack_in_company()

    def sections(self) -> tuple[Section, ...]:
        """Return the sections that announce this stage: hardware, speeds and load."""
        speeds = serving_section([[(part.units, part.speeds) for part in replica] for replica in self.replicas])
        server = self.server
        drafts = min(server.config.max_drafts, MAX_DRAFTS)
        classes = {pipeline.bits for pipeline in server.pipelines}
        load = ServingLoad(
            sessions=server.load,
            cache_tokens_free=server.free_cache_tokens,
            drafts=drafts,
            draft_model="" if self.draft is None else self.draft.name,
            bits=classes.pop() if len(classes) == 1 else b"",
        )
        return self.hardware.section, speeds, load

    @property
    def costs_of_equal_bits(self) -> list[str]:
        """What `--equal-bits` costs each part, as sentences; empty without it."""
        return [part.equal_bits for part in self._parts if part.equal_bits]

    def readings(self) -> Readings:
        """Yield the metrics of this stage."""
        for part in self._parts:
            label, experts = part.worker.meter.label, part.worker.runner.experts
            yield Reading(table.SPEED, part.speeds.decode_units_per_s, (label,))
            yield Reading(table.EXPERTS, experts.text, (label, "text"))
            yield Reading(table.EXPERTS, experts.guesses, (label, "guesses"))
            pools = part.span.expert_pools
            for pool in pools:
                yield Reading(table.EXPERT_READS, pool.hits, (label, "card" if pool.is_on_card else "hit"))
                yield Reading(table.EXPERT_READS, pool.reads, (label, "moved" if pool.is_on_card else "read"))
            if len(pools) == 1 and pools[0].is_on_card:  # all are in the host's memory
                yield Reading(table.EXPERT_READS, pools[0].misses, (label, "hit"))
            if pools:
                yield Reading(table.EXPERT_READ_BYTES, sum(pool.read_bytes for pool in pools), (label,))
        yield from self.server.readings()

    async def drain(self, timeout_s: float) -> None:
        """Take no new sessions, and let the present ones move to other peers."""
        await self.server.drain(timeout_s)

    async def finish(self) -> None:
        """Take no new sessions, and wait until the last session has ended."""
        await self.server.finish()

    def reopen(self) -> None:
        """Accept new sessions again after draining."""
        self.server.reopen()

    def retain(self, host: MemoryLedger) -> RetainedSpan | None:
        """Move the weights of a closed stage into host memory; None if they are quantised, and then they are freed."""
        replicas = [[LoadedSpan(part.device, part.span) for part in replica] for replica in self.replicas]
        return RetainedSpan.of(self.hardware, replicas, host)

    async def close(self, *, keep_span: bool = False) -> None:
        """Stop serving and free all memory. The weights stay if `keep_span` is true."""
        for part in self._parts:
            part.stop_packing()
        await self.tasks.close()
        await self.statements.close()
        await self.server.close()
        if self.draft is not None:
            await self.draft.close()
        for part in self._parts:
            await part.close(keep_span=keep_span)
        gc.unfreeze()  # the objects of this stage may be collected


async def _load_draft(place: StageResources, first: ModelSpan) -> DraftModel | None:
    """Load the draft model, if this node has one and holds the `first` layers; else return None. Raises CheckpointError."""
    part, config = place.hardware.draft, place.hardware.config
    if part is None or not first.has_embedding:
        return None
    capture = config.capture != "off"
    return await DraftModel.load(part, place.hardware.lent[0], place.executors[0], kv=config.kv, capture=capture)


async def _load_part(
    checkpoint: Checkpoint, hardware: Hardware, host: MemoryLedger, part: DevicePart, undo: contextlib.AsyncExitStack
) -> LoadedSpan:
    """Load the layers of `part` onto their device, and count their memory there and in the `host` until `undo` closes. Raises
    CheckpointError."""
    lent, (start, end) = hardware.lent[part.device], part.span
    weights = lent.ledger.count(Account.WEIGHTS, hardware.sizes.need_bytes(start, end, 0))
    undo.callback(weights.release)
    tier = hardware.tier
    in_memory, on_card = (0, 0) if tier is None else tier.numbers_to_load
    beside = host.count(Account.WEIGHTS, tier.host_bytes(end - start) if tier is not None and on_card else 0)
    undo.callback(beside.release)
    load = functools.partial(
        load_span,
        checkpoint,
        start,
        end,
        device=lent.device.torch_device,
        dtype=hardware.dtype,
        quantize=hardware.quantize,
        products=hardware.products,
        expert_slots=in_memory,
        card_experts=on_card,
        equal_bits=hardware.config.equal_bits,
    )
    loading = asyncio.get_running_loop().run_in_executor(None, load)
    try:
        span = await asyncio.shield(loading)
    except asyncio.CancelledError:  # the thread goes on, and its span has no other owner
        loading.add_done_callback(_close_unused)
        raise
    undo.callback(span.close)
    if hardware.head is not None and span.has_head:
        span.reader = await asyncio.to_thread(hardware.head.load, checkpoint, span)
    weights.count(span.weight_bytes)  # tied weights count once
    beside.count(span.host_bytes(RunnerConfig.prefill_positions))
    return LoadedSpan(part.device, span, (weights, beside))


def _close_unused(loading: asyncio.Future[ModelSpan]) -> None:
    """Close a span that was loaded after its stage had given up."""
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()


async def _move_back(retained: LoadedSpan, hardware: Hardware, undo: contextlib.AsyncExitStack) -> LoadedSpan:
    """Move layers that were kept in host memory during a pause back to their device, and count their memory until `undo` closes."""
    lent, span = hardware.lent[retained.device], retained.span
    weights = lent.ledger.count(Account.WEIGHTS, span.weight_bytes)
    undo.callback(weights.release)
    await asyncio.to_thread(span.move_to, lent.device.torch_device)
    return replace(retained, weights=(weights,))


def _pipeline(replica: Replica, journals: MemoryLedger) -> Pipeline:
    """Make the pipeline of a replica, with its expected speeds."""
    speeds = in_sequence((part.units, part.speeds) for part in replica)
    pipeline = Pipeline([part.worker for part in replica], journals, units_per_s=speeds.decode_units_per_s or 1.0)
    units = sum(part.units for part in replica)
    if speeds.decode_units_per_s > 0 and speeds.prefill_units_per_s > 0:
        step_s, position_s = units / speeds.decode_units_per_s, units / speeds.prefill_units_per_s
        pipeline.watch.expect(step_s=step_s, position_s=position_s)
    return pipeline
