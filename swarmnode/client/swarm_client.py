"""A client of a swarm: asks, computes nothing, has no place in the DHT. For asyncio; `sync_client.py` is for everybody else.

async with await swarmnode.aconnect("friends.swarm") as swarm:
    print((await swarm.generate("Once upon a time", max_new_tokens=50)).text)
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swarmnode.audits.auditor import Auditor
from swarmnode.audits.reports import Reports
from swarmnode.client.joining import joining
from swarmnode.client.model_files import ModelFiles
from swarmnode.client.observer import SwarmObserver
from swarmnode.client.remote_encoder import RemoteEncoder, has_segments, labels_of
from swarmnode.client.text_stream import TextStream
from swarmnode.client.tokenizer import ByteTokenizer, ChatMessage, Tokenizer, turn_of
from swarmnode.codec.messages import Mode
from swarmnode.codec.sampling import TokenLogprob
from swarmnode.codec.tensors import check_compression
from swarmnode.config import ClientConfig
from swarmnode.credit.priorities import Claims
from swarmnode.credit.receipts import ReceiptIssuer
from swarmnode.errors import NoRoute, UsageError
from swarmnode.files import default_home
from swarmnode.measuring.meters import ClientMeter, cause_of
from swarmnode.metrics.metric import Readings
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import cancel_and_wait
from swarmnode.peer.explanation import explain
from swarmnode.peer.host import Host
from swarmnode.peer.local_peer import board_of
from swarmnode.plan.view import Span
from swarmnode.platform import MACHINE, Platform
from swarmnode.serving.client.client_session import SESSION_PROTOCOL, ClientSession
from swarmnode.serving.client.directory_router import DirectoryRouter
from swarmnode.serving.client.generation import (
    GenerateKeywords,
    GenerateOptions,
    Generation,
    RingStream,
    with_keywords,
)
from swarmnode.serving.client.limits import ModelLimits
from swarmnode.serving.client.prefix_cache import Beginnings
from swarmnode.serving.client.session_spec import MAX_WIDTH, SessionSpec
from swarmnode.swarm.peers.standing import EVERYBODY, Trust, parse_trust
from swarmnode.swarm.records.manifest import CLASSIFY, EMBED, GENERATE, GRAPH, SERVE, TRAIN
from swarmnode.swarm.storage.swarmfile import Swarm, load_swarm

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Unpack

    from swarmnode.compute.graph.layout import Layout
    from swarmnode.graph_serving.remote_module import RemoteModule
    from swarmnode.serving.client.causal_lm import RemoteCausalLM

T = TypeVar("T")
MAX_SHOWN = 32  # first hops that hear what a node of ours is credited


class SwarmClient(SwarmObserver):
    """The asyncio client. Made by `join` (or `aconnect`), ended by `close`."""

    def __init__(
        self, host: Host, config: ClientConfig, trust: Trust = EVERYBODY, *, most_positions: int | None = None
    ) -> None:
        super().__init__(host)
        self.config = config
        self.trust = trust
        self._files = ModelFiles(host, lambda: self.config.patience_s, most_positions=most_positions)
        self._module: asyncio.Task[RemoteModule] | None = None
        self._clock = host.clock.monotonic
        self._switchboard = board_of(host, SESSION_PROTOCOL, on_peer_lost=host.lost_neighbour)
        self.running: dict[str, Generation] = {}  # what is generated at the moment, by the trace with which it began
        self._meter = ClientMeter()
        self._beginnings = Beginnings()
        self._receipts = ReceiptIssuer(host)
        self._claims = Claims(host)
        self.auditor = Auditor(host, self._switchboard, config, self._receipts.served)
        self.reports = Reports(self.auditor, self._router(Span(0, self.units), ring=True))
        if config.audit_share > 0:
            self.auditor.on_found = self.reports.tell
            self.reports.start()

    @classmethod
    async def join(
        cls,
        swarm: Swarm,
        *,
        home: Path | None = None,
        patience_s: float = 60.0,
        trust: Trust = EVERYBODY,
        audit_share: float = ClientConfig.audit_share,
        most_positions: int | None = None,
        platform: Platform = MACHINE,
    ) -> SwarmClient:
        """Find the swarm; routes will go through peers in `trust` only. `audit_share` of what the
        answers cost is spent on having some computed once more. `most_positions` is how many a text may have in place of what the
        model's config says. Raises NetworkDown where nobody answers within
        `patience_s` seconds, NotAdmitted where those who answer do not have us."""
        home = default_home() if home is None else home
        started_s = platform.clock.monotonic()
        async with joining(swarm, home, patience_s=patience_s, platform=platform) as host:
            await host.manifest(patience_s=patience_s - (platform.clock.monotonic() - started_s))
        config = ClientConfig(patience_s=patience_s, audit_share=audit_share)
        return cls(host, config, trust, most_positions=most_positions)

    async def close(self) -> None:
        """Leave the swarm. Audits that are under way are given up."""
        await self._beginnings.close()
        await self.reports.close()
        await self.auditor.close()
        await self._claims.close()
        await self._receipts.close()
        await self._switchboard.close()
        if self._module is not None:
            await cancel_and_wait(self._module)
            if not self._module.cancelled() and self._module.exception() is None:
                await self._module.result().close()
        await self._files.close()
        await self._host.close()

    @property
    def reroutes(self) -> dict[str, int]:
        """How many sessions were moved to another route so far, by cause."""
        return {cause_of(code): count for code, count in self._meter.reroutes.items()}

    def readings(self) -> Readings:
        """What Prometheus may know of this client."""
        yield from self._meter.readings()
        yield from self.auditor.readings()
        yield from self._host.readings()

    def status(self) -> dict[str, Any]:
        """As the observer's, with how many positions a text may have (`max_model_len`); None without a limit."""
        return {**super().status(), "max_model_len": self.known_positions}

    def why(self, about: str = "") -> dict[str, Any]:
        """What the directory knows of a peer or a unit; where `about` is empty, which way a session would go now, and why."""
        if not about:
            with contextlib.suppress(NoRoute):  # which is written down, too
                self._router(Span(0, self.units), ring=self.manifest.task == GENERATE).route(frozenset(), ())
        return explain(self._host, about)

    # -- generating

    async def stream(
        self,
        prompt: str | Sequence[int],
        options: GenerateOptions | None = None,
        *,
        kept_for: str | None = None,
        special_tokens: bool = False,
        ignore_ends: bool = False,
        **keywords: Unpack[GenerateKeywords],
    ) -> TextStream:
        """Generate a continuation of `prompt`, piece by piece.

        Args:
            prompt: Text or token ids.
            options: Sampling parameters; the keywords below replace single fields.
            kept_for: Keep the caches in the swarm, if there is room, for later prompts of this owner with the same beginning.
            special_tokens: Whether special tokens appear in the text.
            ignore_ends: Whether the text continues behind the model's end tokens.
            **keywords: `max_tokens`, `stop` and the fields of GenerateOptions.

        Returns:
            A stream of GeneratedText. Its `result` is complete when the stream ends.

        Raises:
            UsageError: If the swarm has no language model, or the prompt or an option is impossible for it.
            NoRoute, Busy, PeerError: While reading, if the swarm cannot compute the text within `patience_s`.
        """
        self._host.supervisor.check()
        self.check_language_model()
        options, stops = with_keywords(options, keywords)
        deadline_s = self._clock() + self.config.patience_s
        tokenizer = await self.tokenizer()
        if stops and tokenizer is None:
            raise UsageError("this swarm's checkpoint has no tokenizer: stop strings need one; use stop_ids")
        if isinstance(prompt, str):
            if tokenizer is None:
                raise UsageError("this swarm's checkpoint has no tokenizer: give token ids (--ids)")
            limits = await self.limits()
            limits.check_text(len(prompt))
            prompt = await asyncio.to_thread(tokenizer.encode, prompt)
        limits = await self.limits()
        limits.check_generation(len(prompt), options.max_new_tokens)  # before each id is looked at
        prompt = limits.ids(prompt)
        await limits.check_options(options)
        if not options.stop_ids and not ignore_ends:
            options = dataclasses.replace(options, stop_ids=await self.stop_ids())
        router = self._router(Span(0, self.units), ring=True)
        config = dataclasses.replace(self.config, patience_s=max(0.0, deadline_s - self._clock()))
        spec = options.spec(prompt, vocabulary=limits.vocabulary, allowed=limits.codecs)
        ring = RingStream(
            self._new_session(router, spec, config),
            options,
            audit=self.auditor.take,
            beginnings=self._beginnings if kept_for is not None else None,
            owner=kept_for or "",
        )
        return TextStream(ring, tokenizer, self.running, special_tokens=special_tokens, stops=stops)

    async def stream_chat(
        self,
        messages: Sequence[ChatMessage],
        options: GenerateOptions | None = None,
        *,
        kept_for: str | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> TextStream:
        """Generate the answer to a conversation, piece by piece; arguments and errors are those of `chat` and `stream`."""
        turns = [turn_of(message) for message in messages]
        tokenizer = await self.chat_tokenizer()
        prompt = await asyncio.to_thread(tokenizer.encode_chat, turns)
        return await self.stream(prompt, options, kept_for=kept_for, **keywords)

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        options: GenerateOptions | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Generation:
        """Generate the complete answer to a conversation by the model's chat template.

        Args:
            messages: The turns in order, each a Turn or a dict such as {"role": "user", "content": "Hello"}. Roles are system,
                user and assistant.
            options: Sampling parameters; keywords replace single fields.
            **keywords: `max_tokens`, `stop` and the fields of GenerateOptions.

        Returns:
            The answer, as of `generate`.

        Raises:
            UsageError: If a message has another shape, or the swarm has no tokenizer.
            CheckpointError: If the chat template fails.
        """
        return await _whole(await self.stream_chat(messages, options, **keywords))

    async def chat_tokenizer(self) -> Tokenizer | ByteTokenizer:
        """What `chat` needs. Raises UsageError where the swarm has none, or no language model."""
        self.check_language_model()
        tokenizer = await self.tokenizer()
        if tokenizer is None:
            raise UsageError(
                "this swarm's checkpoint has no tokenizer: it cannot chat; `generate --ids` takes token ids"
            )
        return tokenizer

    async def generate(
        self,
        prompt: str | Sequence[int],
        options: GenerateOptions | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Generation:
        """Generate a complete continuation of `prompt`; arguments and errors are those of `stream`. Calls may run in parallel."""
        return await _whole(await self.stream(prompt, options, **keywords))

    async def score(
        self, prompt: Sequence[int], *, most_likely: int = 0, adapter: str = ""
    ) -> list[tuple[TokenLogprob, ...]]:
        """For each of the prompt's tokens but the first: the logarithm of its probability after those before it, then those of so
        many most likely ones in its place. Raises UsageError, NoRoute, Busy."""
        self._host.supervisor.check()
        self.check_language_model()
        limits, score_prompt = await self.limits(), await asyncio.to_thread(_import_scores)
        limits.check_generation(len(prompt), 1)
        ids = limits.ids(prompt)
        limits.check_adapter(adapter)
        spec = SessionSpec(
            Mode.DRIVEN,
            max_length=len(ids),
            allowed=frozenset(limits.codecs),
            width=limits.vocabulary or MAX_WIDTH,
            adapter=adapter,
        )
        session = self._new_session(self._router(Span(0, self.units), ring=False), spec, self.config)
        try:
            await session.start()
            return await score_prompt(session, ids, most_likely)
        finally:
            await session.close()

    def check_language_model(self) -> None:
        """Raises UsageError where the swarm has none."""
        if self.manifest.kind == GRAPH:
            raise UsageError(
                f"the swarm {self.manifest.name} has no language model: it {self.manifest.purpose}, and cannot generate text"
            )

    def _new_session(self, router: DirectoryRouter, spec: SessionSpec, config: ClientConfig) -> ClientSession:
        meter, clock, on_over = self._meter, self._clock, self._receipts.served
        return ClientSession(self._switchboard, router, spec, config, meter=meter, clock=clock, on_over=on_over)

    def _router(self, span: Span, *, ring: bool) -> DirectoryRouter:
        announced = self._host.directory.peers().values()
        first_hops = (peer.peer for peer in announced if peer.holds(span.start))
        self._claims.show(itertools.islice(first_hops, MAX_SHOWN))
        return DirectoryRouter(self._host, self.units, span, ring=ring, trust=self.trust)

    # -- modules

    async def infer(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The module's outputs, arrays by name, for its inputs, arrays by name: samples along their first dimension, where it was
        exported so. Raises UsageError where the inputs are not those that it takes, NoRoute, Busy."""
        return await (await self.remote_module()).infer(inputs)

    async def remote_module(self) -> RemoteModule:
        """The swarm's graph, every pass through it computed by the swarm. Raises UsageError where the swarm has none to serve."""
        self._host.supervisor.check()
        if self.manifest.kind != GRAPH or self.manifest.mode != SERVE:
            does = "trains its model" if self.manifest.mode == TRAIN else "serves a language model"
            raise UsageError(f"the swarm {self.manifest.name} {does}: there is no module to give arrays to")
        if self._module is None or (self._module.done() and self._module.exception() is not None):
            self._module = asyncio.ensure_future(self._open_module())
        return await asyncio.shield(self._module)

    async def embed(self, texts: Sequence[str | Sequence[int]]) -> list[np.ndarray]:
        """The vectors of texts, or of rows of token ids. Raises UsageError, also where the swarm serves no model that embeds."""
        encoder = await self.encoder(EMBED)
        return await encoder.vectors([await encoder.ids(text) for text in texts])

    async def classify(self, texts: Sequence[str | Sequence[int]]) -> list[dict[str, float]]:
        """How probable each class is for each text. Raises UsageError, also where the swarm serves no classifier."""
        encoder = await self.encoder(CLASSIFY)
        vectors = await encoder.vectors([await encoder.ids(text) for text in texts])
        return [dict(zip(encoder.labels, map(float, vector), strict=True)) for vector in vectors]

    async def encoder(self, task: str) -> RemoteEncoder:
        """The swarm's model, which makes one vector of a text, for a task (`embed`, `classify`). Raises UsageError where it is for
        something else."""
        if self.manifest.task != task:
            raise UsageError(f"the model of {self.manifest.name} {self.manifest.purpose}: it cannot {task}")
        module, tokenizer, limits = await self.remote_module(), await self.tokenizer(), await self.limits()
        if task != CLASSIFY:
            return RemoteEncoder(module, tokenizer, limits, [])
        folder = await self._files.folder()
        return RemoteEncoder(module, tokenizer, limits, labels_of(folder), has_segments=has_segments(folder))

    async def _open_module(self) -> RemoteModule:
        module_class, layout = await asyncio.to_thread(_import_module, await self._files.folder())

        def router(span: Span) -> DirectoryRouter:
            return self._router(span, ring=False)

        def served(peer: PeerId, work: bytes, unit_samples: int) -> None:
            self._receipts.note(peer, work, served=unit_samples)

        config = self.config
        return module_class(
            self._host,
            layout,
            router,
            patience_s=config.patience_s,
            on_served=served,
            audit_share=config.audit_share,
        )

    # -- transformers

    async def acausal_lm(self, *, hold_ends: bool = False, compress: str = "none", adapter: str = "") -> RemoteCausalLM:
        """The swarm as a transformers model whose `generate` drives every step; call it from other threads than this loop's.

        With `hold_ends` the model's embedding and head run here: token ids and logits never leave this machine. `compress` and
        `adapter`: as GenerateOptions'."""
        self._host.supervisor.check()
        self.check_language_model()
        check_compression(compress, self.manifest.codecs)
        (await self.limits()).check_adapter(adapter, hold_ends=hold_ends)
        loop = asyncio.get_running_loop()

        def run(coroutine: Coroutine[Any, Any, T]) -> T:
            return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

        weights = await self._files.weights()
        checkpoint = await weights.outline()
        model_class, ends_class = await asyncio.to_thread(_import_causal_lm)
        ends = None
        if hold_ends:
            ends = await asyncio.to_thread(ends_class.load, await weights.ends())
        span = Span(1, self.units - 1) if hold_ends else Span(0, self.units)
        router = self._router(span, ring=False)

        def open_session(spec: SessionSpec) -> ClientSession:
            return self._new_session(router, spec, self.config)

        return await asyncio.to_thread(
            model_class,
            checkpoint.config,
            open_session,
            run,
            folder=checkpoint.path,
            ends=ends,
            prompt_chunk_tokens=self.config.prompt_chunk_tokens,
            limits=await self.limits(),
            compress=compress,
            adapter=adapter,
        )

    # -- the model

    async def tokenizer(self) -> Tokenizer | ByteTokenizer | None:
        """The checkpoint's own; a swarm that trains without one does so on bytes."""
        return await self._files.tokenizer()

    async def limits(self) -> ModelLimits:
        """What the model can be asked for."""
        return await self._files.limits()

    @property
    def known_positions(self) -> int | None:
        """How many positions a text may have, as far as that is known by now; None without a limit."""
        return self._files.known_positions

    async def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        return await self._files.stop_ids()

    async def generation_defaults(self) -> dict[str, float | int]:
        """How the checkpoint's makers have tokens drawn: fields of GenerateOptions, for who asks for them."""
        return await self._files.generation_defaults()


async def _whole(stream: TextStream) -> Generation:
    async for _ in stream:
        pass
    return stream.result


def _import_module(folder: Path) -> tuple[type[RemoteModule], Layout]:
    """The class, and the graph in a folder: off the loop, as what follows. Raises CheckpointError."""
    from swarmnode.compute.graph.layout import Layout
    from swarmnode.compute.graph.serialise import read_graph
    from swarmnode.graph_serving.remote_module import RemoteModule

    return RemoteModule, Layout(read_graph(folder))


def _import_scores() -> Callable[
    [ClientSession, Sequence[int], int], Coroutine[Any, Any, list[tuple[TokenLogprob, ...]]]
]:
    from swarmnode.client.prompt_scores import score_prompt

    return score_prompt


def _import_causal_lm() -> tuple[Any, Any]:
    """The transformers side, imported off the loop since it takes a second."""
    from swarmnode.serving.client.causal_lm import Ends, RemoteCausalLM

    return RemoteCausalLM, Ends


async def aconnect(
    swarm: str | Path,
    *,
    home: str | Path | None = None,
    patience_s: float = 60.0,
    trust: Sequence[str] = (),
    audit_share: float = ClientConfig.audit_share,
) -> SwarmClient:
    """Join a swarm (a .swarm file, an invite, or a public swarm's name) as an asyncio client:
    `async with await aconnect(...) as swarm`.

    `trust` restricts who computes: peer ids or their ends, `group:NAME`, `net:203.0.113.0/24`; empty is everybody.
    `audit_share` is how much of what the answers cost is spent on having some computed once more by other peers; 0 for none.
    Raises NetworkDown, UsageError, NotAdmitted.
    """
    folder = None if home is None else Path(home)
    known, trusted = load_swarm(swarm, folder), parse_trust(trust)
    return await SwarmClient.join(known, home=folder, patience_s=patience_s, trust=trusted, audit_share=audit_share)
