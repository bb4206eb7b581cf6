"""Client of a swarm for asyncio: it asks, computes nothing, and stores nothing for the DHT. `sync_client.py` is for code without
asyncio.

async with await swarmnode.aconnect("friends.swarm") as swarm:
    print((await swarm.generate("Once upon a time", max_new_tokens=50)).text)
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from swarmnode.audits.auditor import Auditor, Reports
from swarmnode.client.adapters import ClientAdapters
from swarmnode.client.model_files import ModelFiles
from swarmnode.client.observer import SwarmObserver
from swarmnode.client.remote_encoder import RemoteEncoder, has_segments, labels_of
from swarmnode.client.text_stream import TextStream
from swarmnode.client.tokenizer import ByteTokenizer, ChatMessage, Tokenizer, turn_of
from swarmnode.codec.messages import DRAFT_SOURCES, Mode
from swarmnode.codec.sampling import TokenLogprob
from swarmnode.codec.tensors import check_compression
from swarmnode.config import ClientConfig
from swarmnode.credit.priorities import Claims
from swarmnode.credit.receipts import ReceiptIssuer
from swarmnode.errors import CheckpointError, NoRoute, UsageError
from swarmnode.files import home_folder
from swarmnode.measuring.meters import ClientMeter, cause_of
from swarmnode.metrics.metric import Readings
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import cancel_and_wait
from swarmnode.peer.explanation import explain
from swarmnode.peer.host import Host, joining
from swarmnode.peer.questions import board_of
from swarmnode.plan.view import Span
from swarmnode.platform import MACHINE, Platform
from swarmnode.serving.client.client_session import SESSION_PROTOCOL, ClientSession
from swarmnode.serving.client.generation import (
    GenerateKeywords,
    GenerateOptions,
    Generation,
    RingStream,
    with_keywords,
)
from swarmnode.serving.client.limits import ModelLimits
from swarmnode.serving.client.prefix_cache import Beginnings
from swarmnode.serving.client.router import DirectoryRouter
from swarmnode.serving.client.session_spec import MAX_WIDTH, SessionSpec
from swarmnode.swarm.peers.standing import EVERYBODY, Trust, parse_trust
from swarmnode.swarm.records.manifest import CLASSIFY, EMBED, GENERATE, GRAPH, SERVE, TRAIN
from swarmnode.swarm.storage.swarmfile import Swarm, load_swarm

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Unpack

    from swarmnode.client.tuning.client import TuningClient
    from swarmnode.client.tuning.tuned_lm import TunedCausalLM
    from swarmnode.compute.graph.boundary import Layout
    from swarmnode.graph_serving.remote_module import RemoteModule
    from swarmnode.serving.client.causal_lm import RemoteCausalLM

log = logging.getLogger(__name__)

T = TypeVar("T")
AT_ONCE_S = 1.0  # for an adapter's chat template where only its end of an answer is needed
MAX_SHOWN = 32  # first hops that learn the credit of this machine's nodes


class SizeKeywords(TypedDict, total=False):
    """Keyword arguments of a model that trains: the most rows of a batch, tokens of a row, and passes that wait for `backward`."""

    rows: int
    positions: int
    window: int


class SwarmClient(SwarmObserver):
    """Client of a swarm for asyncio. Create it with `aconnect` or `join`; end it with `close`, or use it as an async context
    manager."""

    def __init__(
        self, host: Host, config: ClientConfig, trust: Trust = EVERYBODY, *, most_positions: int | None = None
    ) -> None:
        super().__init__(host)
        self.config = config
        self.trust = trust
        self._files = ModelFiles(host, lambda: self.config.patience_s, most_positions=most_positions)
        self._module: asyncio.Task[RemoteModule] | None = None
        self._tuning: TuningClient | None = None
        self._clock = host.clock.monotonic
        self._switchboard = board_of(host, SESSION_PROTOCOL, on_peer_lost=host.lost_neighbour)
        self.running: dict[str, Generation] = {}  # running generations, by trace
        self._meter = ClientMeter()
        self._beginnings = Beginnings()
        self.adapters = ClientAdapters(host, self._files)
        self._receipts = ReceiptIssuer(host)
        self._claims = Claims(host)
        self.auditor = Auditor(host, self._switchboard, config, self._receipts.served)
        self.auditor.replays.with_adapter = self.adapters.with_adapter
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
        """Join the swarm as a client.

        Args:
            swarm: The swarm to join.
            home: Folder for the client's state; by default $SWARMNODE_HOME, else the platform's place for user data.
            patience_s: How long to wait for the swarm, in seconds; also how long a later request waits for a route.
            trust: Peers that may compute.
            audit_share: Share of the answers' cost to spend on recomputing some of them at other peers; 0 turns this off.
            most_positions: Number of positions that a text may have, in place of the model's config.
            platform: Network, executor and clock; tests pass their own.

        Returns:
            The client, which has the swarm's manifest.

        Raises:
            NetworkDown: No peer answers within `patience_s`.
            NotAdmitted: The peers that answer refuse this client.
        """
        home = home_folder(home)
        started_s = platform.clock.monotonic()
        async with joining(swarm, home, patience_s=patience_s, platform=platform) as host:
            await host.manifest(patience_s=patience_s - (platform.clock.monotonic() - started_s))
        config = ClientConfig(patience_s=patience_s, audit_share=audit_share)
        return cls(host, config, trust, most_positions=most_positions)

    async def close(self) -> None:
        """Leave the swarm. Unfinished audits are abandoned."""
        await self._beginnings.close()
        await self.reports.close()
        await self.auditor.close()
        await self._claims.close()
        await self._receipts.close()
        await self._switchboard.close()
        if self._tuning is not None:
            await self._tuning.leave()
        if self._module is not None:
            await cancel_and_wait(self._module)
            if not self._module.cancelled() and self._module.exception() is None:
                await self._module.result().close()
        await self.adapters.close()
        await self._files.close()
        await self._host.close()

    @property
    def reroutes(self) -> dict[str, int]:
        """Number of sessions that this client moved to another route, by cause."""
        return {cause_of(code): count for code, count in self._meter.reroutes.items()}

    def readings(self) -> Readings:
        """Return the metrics of this client, its audits and its connections, for Prometheus."""
        yield from self._meter.readings()
        yield from self.auditor.readings()
        yield from self._host.readings()

    def status(self) -> dict[str, Any]:
        """Return the status of SwarmObserver, with the number of positions of a text as `max_model_len` (None without a known
        limit)."""
        return {**super().status(), "max_model_len": self.known_positions}

    def why(self, about: str = "") -> dict[str, Any]:
        """Return facts and decisions about a peer, a layer or a session.

        Args:
            about: A peer's name, its id or the id's end; a layer's number; or the beginning of a session's trace id. If empty, a
                route is chosen as for a new session, and the result is about this client.

        Returns:
            A dict with `facts`, a list of sentences, and `decisions`, the latest first.
        """
        if not about:
            with contextlib.suppress(NoRoute):  # the refusal is recorded, too
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
                raise UsageError("this swarm's checkpoint has no tokenizer: give token ids (--ids) instead of text")
            limits = await self.limits()
            limits.check_text(len(prompt))
            prompt = await asyncio.to_thread(tokenizer.encode, prompt)
        limits = await self.limits()
        limits.check_generation(len(prompt), options.max_new_tokens)  # before each id is looked at
        prompt = limits.ids(prompt)
        await limits.check_options(options)
        if not options.stop_ids and not ignore_ends:
            options = dataclasses.replace(options, stop_ids=await self.stop_ids(options.adapter))
        options = dataclasses.replace(options, adapter=await self.adapters.resolve(options.adapter))
        self._check_drafts(options.drafts)
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

    def _check_drafts(self, drafts: str) -> None:
        """Log a warning if `drafts` names a draft model that no machine has. Guesses then come from look-up."""
        offered = {peer.draft_model for peer in self._host.directory.peers().values()} - {""}
        if drafts not in (*DRAFT_SOURCES, *offered):
            have = f"it has {', '.join(sorted(offered))}" if offered else "it has none"
            log.warning("the swarm has no draft model %r (%s): guesses come from prompt and answer", drafts, have)

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
        tokenizer = await self.chat_tokenizer(with_keywords(options, keywords)[0].adapter)
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

    async def chat_tokenizer(self, adapter: str = "") -> Tokenizer | ByteTokenizer:
        """Return the tokenizer that `chat` needs, with an `adapter` the one of its chats. Raises UsageError if the swarm has none,
        or no language model."""
        self.check_language_model()
        tokenizer = await self.tokenizer(adapter)
        if tokenizer is None:
            raise UsageError(
                "this swarm's checkpoint has no tokenizer, so it cannot chat: use `generate --ids` with token ids"
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
        """Return for each token of the prompt except the first its log probability given the tokens before it, followed by those of
        the `most_likely` most likely tokens in its place. Raises UsageError, NoRoute, Busy."""
        self._host.supervisor.check()
        self.check_language_model()
        limits, score_prompt = await self.limits(), await asyncio.to_thread(_import_scores)
        limits.check_generation(len(prompt), 1)
        ids = limits.ids(prompt)
        spec = SessionSpec(
            Mode.DRIVEN,
            max_length=len(ids),
            allowed=frozenset(limits.codecs),
            width=limits.vocabulary or MAX_WIDTH,
            adapter=await self.adapters.resolve(adapter),
        )
        session = self._new_session(self._router(Span(0, self.units), ring=False), spec, self.config)
        try:
            await session.start()
            return await score_prompt(session, ids, most_likely)
        finally:
            await session.close()

    def check_language_model(self) -> None:
        """Raise UsageError if the swarm has no language model."""
        if self.manifest.kind == GRAPH:
            raise UsageError(
                f"the swarm {self.manifest.name} has no language model: it "
                f"{self.manifest.purpose}, and cannot generate text; choose another swarm"
            )

    def _new_session(self, router: DirectoryRouter, spec: SessionSpec, config: ClientConfig) -> ClientSession:
        meter, clock, on_over = self._meter, self._clock, self._receipts.served
        return ClientSession(
            self._switchboard,
            router,
            spec,
            config,
            meter=meter,
            clock=clock,
            on_over=on_over,
            with_adapter=self.adapters.with_adapter,
        )

    def _router(self, span: Span, *, ring: bool) -> DirectoryRouter:
        announced = self._host.directory.peers().values()
        first_hops = (peer.peer for peer in announced if peer.holds(span.start))
        self._claims.show(itertools.islice(first_hops, MAX_SHOWN))
        return DirectoryRouter(self._host, self.units, span, ring=ring, trust=self.trust)

    async def tuning(self) -> TuningClient:
        """Return the client of this swarm that tunes adapters, for as long as this client is open. Raises UsageError if the swarm
        serves no language model."""
        if self._tuning is None:
            client_class = await asyncio.to_thread(_import_tuning)
            self._tuning = client_class(self._host, self.trust, self.config.patience_s)
        return self._tuning

    # -- modules

    async def infer(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Compute the outputs of the swarm's module.

        Args:
            inputs: Arrays by name, with samples along the first dimension if the module was exported so.

        Returns:
            Arrays by name.

        Raises:
            UsageError: The swarm serves no module, or the inputs do not fit it.
            NoRoute: The peers do not cover the module within the client's patience.
            Busy: The peers have no room within the client's patience.
        """
        return await (await self.remote_module()).infer(inputs)

    async def remote_module(self) -> RemoteModule:
        """Return the swarm's module, whose passes the swarm computes. Raises UsageError if the swarm serves none."""
        self._host.supervisor.check()
        if self.manifest.kind != GRAPH or self.manifest.mode != SERVE:
            does = "trains its model" if self.manifest.mode == TRAIN else "serves a language model"
            raise UsageError(
                f"the swarm {self.manifest.name} {does}: it has no module that takes arrays; choose another swarm"
            )
        if self._module is None or (self._module.done() and self._module.exception() is not None):
            self._module = asyncio.ensure_future(self._open_module())
        return await asyncio.shield(self._module)

    async def embed(self, texts: Sequence[str | Sequence[int]], *, truncate: bool = True) -> list[np.ndarray]:
        """Compute the vectors of texts.

        Args:
            texts: Texts, or rows of token ids.
            truncate: Cut texts that are longer than the model takes, as sentence-transformers does; else they are refused.

        Returns:
            One float32 vector per text.

        Raises:
            UsageError: The swarm's model does not embed texts, or a text cannot be encoded.
            ContextTooLong: A text is longer than the model takes, and not to be cut.
            NoRoute: The peers do not cover the model within the client's patience.
            Busy: The peers have no room within the client's patience.
        """
        encoder, most_tokens = await self.encoder(EMBED), -1 if truncate else None
        return await encoder.vectors([await encoder.ids(text, most_tokens=most_tokens) for text in texts])

    async def classify(self, texts: Sequence[str | Sequence[int]]) -> list[dict[str, float]]:
        """Classify texts.

        Args:
            texts: Texts, or rows of token ids.

        Returns:
            For each text, the probabilities of the classes by their labels.

        Raises:
            UsageError: The swarm serves no classifier, or a text cannot be encoded.
            ContextTooLong: A text is longer than the model takes.
            NoRoute: The peers do not cover the model within the client's patience.
            Busy: The peers have no room within the client's patience.
        """
        encoder = await self.encoder(CLASSIFY)
        vectors = await encoder.vectors([await encoder.ids(text) for text in texts])
        return [dict(zip(encoder.labels, map(float, vector), strict=True)) for vector in vectors]

    async def encoder(self, task: str) -> RemoteEncoder:
        """Return the swarm's encoder for `task`: `embed` or `classify`. Raises UsageError if the swarm's model has another task."""
        if self.manifest.task != task:
            raise UsageError(
                f"the model of {self.manifest.name} {self.manifest.purpose}: it cannot {task}; choose another swarm"
            )
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
        """Return the swarm as a transformers model whose `generate` drives every step. Call the model from other threads than this
        loop's.

        Args:
            hold_ends: Whether the embedding and the head run here, so that token ids and logits never leave this machine.
            compress: Encoding of data between machines, as in GenerateOptions.
            adapter: Name of an adapter, as in GenerateOptions; empty for none.

        Returns:
            The model.

        Raises:
            UsageError: The swarm has no language model, or an argument is not possible.
        """
        self._host.supervisor.check()
        self.check_language_model()
        check_compression(compress, self.manifest.codecs)
        if adapter and hold_ends:
            raise UsageError(
                "hold_ends does not work with an adapter: its changes to "
                "embedding and head are not here; leave out one of the two"
            )
        adapter = await self.adapters.resolve(adapter)
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

    async def trainable_lm(
        self, adapter: Any = None, *, hold_ends: bool = True, compress: str = "none", **sizes: Unpack[SizeKeywords]
    ) -> TunedCausalLM:
        """Return the swarm as a transformers model that trains. Call the model from other threads than this loop's.

        Args:
            adapter: Adapter to train: peft's config, fields of a recipe such as {"method": "lora", "rank": 16}, or the folder of a
                saved one, to train it further. None for gradients of the caller's own parameters alone.
            hold_ends: Run embedding and head here, so that logits come out, and token ids and labels stay here. Otherwise the swarm
                computes the loss alone.
            compress: Codec of activations and gradients between machines.
            **sizes: `rows` and `positions`, the most rows of a batch and tokens of a row; `window`, the most forward passes that
                wait for their backward pass.

        Raises:
            UsageError: If the swarm serves no language model, or it cannot have such an adapter.
            CheckpointError: If the folder or the ends cannot be read.
            NoRoute, Busy: If no machines tune within the client's patience.
        """
        self._host.supervisor.check()
        tuning = await self.tuning()
        model_class, settings_class, chosen_adapter = await asyncio.to_thread(_import_trainable)
        loop = asyncio.get_running_loop()

        def run(coroutine: Coroutine[Any, Any, T]) -> T:
            return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

        recipe, weights = await asyncio.to_thread(chosen_adapter, adapter)
        settings = settings_class(recipe, hold_ends, compress=compress, **sizes)
        model: TunedCausalLM = await asyncio.to_thread(model_class, run, await tuning.module_parts(settings, weights))
        return model

    # -- the model

    async def tokenizer(self, adapter: str = "") -> Tokenizer | ByteTokenizer | None:
        """Return the checkpoint's tokenizer; for a swarm that trains without one, a ByteTokenizer; else None. With an `adapter`
        that has a chat template of its own, chats by this tokenizer use it. Raises NoRoute if no peer provides the files,
        CheckpointError if the tokenizer cannot be used, UsageError if there is no such adapter."""
        return await self.adapters.tokenizer(adapter)

    async def limits(self) -> ModelLimits:
        """Return the bounds on requests to the model. Raises NoRoute if no peer provides the config."""
        return await self._files.limits()

    @property
    def known_positions(self) -> int | None:
        """Number of positions that a text may have, as far as known; None if there is no limit or it is not known yet."""
        return self._files.known_positions

    async def stop_ids(self, adapter: str = "") -> tuple[int, ...]:
        """Return the ids of the tokens that end a text; empty if none are known. With an `adapter` that has a chat template of its
        own, they end its answers; if no peer gives that template at once, they are the model's own. Raises NoRoute if no peer
        provides the model's files, UsageError if there is no such adapter."""
        tokenizer = None
        with contextlib.suppress(NoRoute, CheckpointError):
            tokenizer = await self.adapters.tokenizer(adapter, patience_s=AT_ONCE_S) if adapter else None
        return await self._files.stop_ids(tokenizer)

    async def generation_defaults(self) -> dict[str, float | int]:
        """Return the defaults for sampling over HTTP, as fields of GenerateOptions: the checkpoint's, or temperature 0.8, top-k 40
        and top-p 0.95 if it has none. They apply only if the caller passes them on."""
        return await self._files.generation_defaults()

    @property
    def known_defaults(self) -> dict[str, float | int] | None:
        """Result of `generation_defaults`, as far as known without asking a peer; None if it is not known yet."""
        return self._files.known_defaults


async def _whole(stream: TextStream) -> Generation:
    async for _ in stream:
        pass
    return stream.result


def _import_module(folder: Path) -> tuple[type[RemoteModule], Layout]:
    """Import RemoteModule, and read the graph in `folder`; called in a thread. Raises CheckpointError if the graph cannot be
    read."""
    from swarmnode.compute.graph.boundary import Layout
    from swarmnode.compute.graph.serialise import read_graph
    from swarmnode.graph_serving.remote_module import RemoteModule

    return RemoteModule, Layout(read_graph(folder))


def _import_tuning() -> type[TuningClient]:
    """Import the client of tunings, which takes seconds as torch comes with it."""
    from swarmnode.client.tuning.client import TuningClient

    return TuningClient


def _import_trainable() -> tuple[Any, Any, Any]:
    """Import the class of models that train, the class of their settings, and the function that reads an adapter."""
    from swarmnode.client.tuning.client import ModuleSettings, chosen_adapter
    from swarmnode.client.tuning.tuned_lm import TunedCausalLM

    return TunedCausalLM, ModuleSettings, chosen_adapter


def _import_scores() -> Callable[
    [ClientSession, Sequence[int], int], Coroutine[Any, Any, list[tuple[TokenLogprob, ...]]]
]:
    from swarmnode.client.prompt_scores import score_prompt

    return score_prompt


def _import_causal_lm() -> tuple[Any, Any]:
    """Import the classes that need transformers; called in a thread because it takes a second."""
    from swarmnode.serving.client.causal_lm import Ends, RemoteCausalLM

    return RemoteCausalLM, Ends


async def aconnect(
    swarm: Swarm | str | Path,
    *,
    home: str | Path | None = None,
    patience_s: float = 60.0,
    trust: Sequence[str] = (),
    audit_share: float = ClientConfig.audit_share,
) -> SwarmClient:
    """Join a swarm as an asyncio client: `async with await aconnect(...) as swarm`.

    Args:
        swarm: The result of `create`, a .swarm file, an invite, or the name of a joined, founded or public swarm.
        home: Folder for the client's state; by default $SWARMNODE_HOME, else the platform's place for user data.
        patience_s: How long to wait for the swarm, in seconds; also how long a later request waits for a route.
        trust: Peers that may compute: peer ids or their ends, `group:NAME`, `net:203.0.113.0/24`. Empty allows all.
        audit_share: Share of the answers' cost to spend on recomputing some of them at other peers; 0 turns this off.

    Returns:
        The client.

    Raises:
        NetworkDown: No peer answers in time.
        UsageError: `swarm` or `trust` cannot be read.
        NotAdmitted: The swarm refuses this client.
    """
    folder = home_folder(home)
    known = swarm if isinstance(swarm, Swarm) else load_swarm(swarm, folder)
    trusted = parse_trust(trust)
    return await SwarmClient.join(known, home=folder, patience_s=patience_s, trust=trusted, audit_share=audit_share)
