"""Client of a swarm for asyncio: it asks, computes nothing, and stores nothing for the DHT. `sync_client.py` is for code without
asyncio.

async with await swarmnode.aconnect("friends.swarm") as swarm:
    print((await swarm.generate("Once upon a time", max_new_tokens=50)).text)
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from swarmnode.audits.auditor import Auditor, Reports
from swarmnode.client.model_files import loaded
from swarmnode.client.remote_encoder import ModelClient
from swarmnode.client.text_stream import TextStream
from swarmnode.client.tokenizer import ByteTokenizer, ChatMessage, Tokenizer, turn_of
from swarmnode.codec.messages import DRAFT_SOURCES, Mode
from swarmnode.codec.sampling import TokenLogprob
from swarmnode.codec.tensors import check_compression
from swarmnode.config import ClientConfig
from swarmnode.errors import NoRoute, UsageError
from swarmnode.files import home_folder
from swarmnode.measuring.meters import ClientMeter, cause_of
from swarmnode.metrics.metric import Readings
from swarmnode.peer.host import Host, joining
from swarmnode.peer.questions import board_of
from swarmnode.peer.swarm_status import explain
from swarmnode.plan.view import Span
from swarmnode.platform import MACHINE, Platform
from swarmnode.serving.client.client_session import SESSION_PROTOCOL, ClientSession
from swarmnode.serving.client.generation import GenerateKeywords, GenerateOptions, Generation, RingStream, with_keywords
from swarmnode.serving.client.prefix_cache import Beginnings
from swarmnode.serving.client.router import DirectoryRouter
from swarmnode.serving.client.session_spec import MAX_WIDTH, SessionSpec
from swarmnode.swarm.records.announcement import EVERYBODY, Trust, parse_trust
from swarmnode.swarm.records.manifest import GENERATE, GRAPH
from swarmnode.swarm.storage.swarmfile import Swarm, load_swarm

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from swarmnode.client.tuning.client import TuningClient
    from swarmnode.client.tuning.tuned_lm import TunedCausalLM
    from swarmnode.serving.client.causal_lm import RemoteCausalLM

log = logging.getLogger(__name__)

T = TypeVar("T")


class SizeKeywords(TypedDict, total=False):
    """Keyword arguments of a model that trains: the most rows of a batch, tokens of a row, and passes that wait for `backward`."""

    rows: int
    positions: int
    window: int


class SwarmClient(ModelClient):
    """Client of a swarm for asyncio. Create it with `aconnect` or `join`; end it with `close`, or use it as an async context
    manager."""

    def __init__(
        self, host: Host, config: ClientConfig, trust: Trust = EVERYBODY, *, most_positions: int | None = None
    ) -> None:
        super().__init__(host, config, trust, most_positions=most_positions)
        self._tuning: TuningClient | None = None
        self._clock = host.clock.monotonic
        self._switchboard = board_of(host, SESSION_PROTOCOL, on_peer_lost=host.lost_neighbour)
        self.running: dict[str, Generation] = {}  # running generations, by trace
        self._meter = ClientMeter()
        self._beginnings = Beginnings()
        self.auditor = Auditor(host, self._switchboard, config, self._receipts.served)
        self.auditor.replays.with_adapter = self.adapters.with_adapter
        self.reports = Reports(self.auditor, self._router(Span(0, self.units), ring=True))
        if config.audit_share > 0:
            self.auditor.on_false_work = self.reports.tell
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
        await super().close()

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
        return {**super().status(), "max_model_len": self.cached_positions}

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
        offered = {peer.draft_model for peer in self._host.directory.peers().values()} - {""}
        if options.drafts not in (*DRAFT_SOURCES, *offered):
            have = f"it has {', '.join(sorted(offered))}" if offered else "it has none"
            log.warning(
                "the swarm has no draft model %r (%s): guesses come from prompt and answer", options.drafts, have
            )
        router = self._router(Span(0, self.units), ring=True)
        config = dataclasses.replace(self.config, patience_s=max(0.0, deadline_s - self._clock()))
        spec = options.spec(prompt, vocabulary=limits.vocabulary, allowed=limits.codecs)
        ring = RingStream(
            self._new_session(router, spec, config),
            options,
            audit=self.auditor.sample,
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
        self, prompt: str | Sequence[int], options: GenerateOptions | None = None, **keywords: Unpack[GenerateKeywords]
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
        limits = await self.limits()
        await loaded("swarmnode.client.prompt_scores")
        from swarmnode.client.prompt_scores import score_prompt

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

    async def tuning(self) -> TuningClient:
        """Return the client of this swarm that tunes adapters, for as long as this client is open. Raises UsageError if the swarm
        serves no language model."""
        if self._tuning is None:
            await loaded("swarmnode.client.tuning.client")
            from swarmnode.client.tuning.client import TuningClient

            self._tuning = TuningClient(self._host, self.trust, self.config.patience_s)
        return self._tuning

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
        check_compression(compress, self.manifest.session_codecs)
        if adapter and hold_ends:
            raise UsageError(
                "hold_ends does not work with an adapter: its changes to "
                "embedding and head are not here; leave out one of the two"
            )
        if hold_ends and self.manifest.bottleneck:
            raise UsageError(
                "hold_ends does not work with a bottleneck: its first and last stage hold layers besides; leave it out"
            )
        adapter = await self.adapters.resolve(adapter)
        loop = asyncio.get_running_loop()

        def run(coroutine: Coroutine[Any, Any, T]) -> T:
            return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

        weights = await self._files.weights()
        checkpoint = await weights.outline()
        await loaded("swarmnode.serving.client.causal_lm")
        from swarmnode.serving.client.causal_lm import Ends, RemoteCausalLM

        ends = await asyncio.to_thread(Ends.load, await weights.ends()) if hold_ends else None
        span = Span(1, self.units - 1) if hold_ends else Span(0, self.units)
        router = self._router(span, ring=False)

        def open_session(spec: SessionSpec) -> ClientSession:
            return self._new_session(router, spec, self.config)

        return await asyncio.to_thread(
            RemoteCausalLM,
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
        await loaded("swarmnode.client.tuning.tuned_lm")
        from swarmnode.client.tuning.client import ModuleSettings, chosen_adapter
        from swarmnode.client.tuning.tuned_lm import TunedCausalLM

        loop = asyncio.get_running_loop()

        def run(coroutine: Coroutine[Any, Any, T]) -> T:
            return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

        recipe, weights = await asyncio.to_thread(chosen_adapter, adapter)
        settings = ModuleSettings(recipe, hold_ends, compress=compress, **sizes)
        return await asyncio.to_thread(TunedCausalLM, run, await tuning.module_parts(settings, weights))


async def _whole(stream: TextStream) -> Generation:
    async for _ in stream:
        pass
    return stream.result


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
