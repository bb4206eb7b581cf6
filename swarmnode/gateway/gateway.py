"""Gateway of several swarms: the models that it serves, its API keys and its queue.

A swarm's model, with or without an adapter, as a model of the gateway's API: turns prompts into token ids, and requests into
streams of generated text.

Settings of a gateway. Times in seconds, sizes in bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import Request

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.client.text_stream import TextStream
from swarmnode.client.tokenizer import ByteTokenizer, Tokenizer
from swarmnode.codec.messages import LOOKUP
from swarmnode.data.conversation import ChatEnding, ChatRenderer
from swarmnode.errors import CheckpointError, NoRoute
from swarmnode.gateway.access.keys import ApiKey, FairQueue, KeyRing
from swarmnode.gateway.generation.choice_stream import ChoiceStream, NoTokens
from swarmnode.gateway.generation.request_fields import SamplingFields, ToolUse
from swarmnode.gateway.generation.response_parser import THOUGHTS_BEGIN as THINK_BEGIN
from swarmnode.gateway.generation.response_parser import CommonParser, ReasoningParser, ResponseParser, TemplateParser
from swarmnode.gateway.http.api_error import RETRY_S, ApiError, bad_request
from swarmnode.gateway.openai.kept_responses import ResponseStore
from swarmnode.gateway.openai.replies import ModelCard
from swarmnode.net.tasks import Tasks
from swarmnode.serving.client.generation import GenerateOptions
from swarmnode.swarm.records.manifest import GENERATE


@dataclass(frozen=True)
class GatewayConfig:
    """Bounds on requests to the gateway. `origins` are the web origins whose pages browsers let call it (CORS); none by default."""

    running: int = 256  # generations at once, all keys together
    waiting: int = 256  # requests of one key that wait for a place
    wait_s: float = 60.0  # for a place
    max_choices: int = 16  # texts of one request: n times its prompts
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 30.0  # for a body to arrive
    write_timeout_s: float = 60.0  # for a client to take one piece of a stream
    default_new_tokens: int = 1024  # if a request sets no maximum; fewer if they do not fit
    loopback: bool = True  # only this machine connects: another name in Host means that a web page led the browser here
    origins: tuple[str, ...] = ()
    compress: str = "auto"  # encoding of tensors between peers, for all requests to this gateway
    drafts: str = LOOKUP  # source of guessed tokens, for all requests to this gateway


log = logging.getLogger(__name__)

NO_TOKENIZER = "this swarm's checkpoint has no tokenizer: send token ids to /v1/completions instead of text"
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0  # between attempts to load a tokenizer
SHORT_CHARS = 2048  # a tokenizer takes some 0.5 ms for them
PROMPT_END_TOKENS = 8  # a template that opens the reasoning does it within these last tokens of the prompt


class TokenizerLoader:
    """Loader of the tokenizer of `client`'s swarm. One of `tasks` does the loading, however many requests wait for it."""

    def __init__(self, client: SwarmClient, tasks: Tasks) -> None:
        self._client = client
        self._tasks = tasks
        self._loading: asyncio.Task[Tokenizer | ByteTokenizer | None] | None = None
        self.prompter: ChatRenderer | None = None  # set after loading if the tokenizer has a chat template

    @property
    def is_done(self) -> bool:
        """Whether loading has ended: the tokenizer is there, or the checkpoint is known to have none."""
        return self._loading is not None and self._loading.done()

    async def tokenizer(self) -> Tokenizer | ByteTokenizer | None:
        """Return the swarm's tokenizer, as `SwarmClient.tokenizer` does, after waiting for it at most the client's patience; None
        if the checkpoint has none. Raises NoRoute if no peer provides the files in that time, ApiError (503) if loading takes
        longer, CheckpointError if the tokenizer cannot be used."""
        if self._loading is not None and self._loading.done():
            return self._loading.result()
        loop, patience_s = asyncio.get_running_loop(), self._client.config.patience_s
        until_s = loop.time() + patience_s
        loading = await self._begun()
        try:
            return await asyncio.wait_for(asyncio.shield(loading), until_s - loop.time())
        except asyncio.TimeoutError:
            sentence = f"the model's tokenizer is still loading after {patience_s:g} s: send the request again later"
            raise ApiError("loading", sentence, retry_s=RETRY_S) from None

    async def load(self) -> None:
        """Load the tokenizer before the first request needs it, as soon as peers provide its files. After any other failure, try
        again after a pause, which doubles up to `MOST_PAUSE_S`."""
        pause_s = FIRST_PAUSE_S
        while not self.is_done:
            try:
                await asyncio.shield(await self._begun())
            except NoRoute:
                await self._client.changed()
            except Exception as error:  # also a library's own errors: /ready stays false until this succeeds
                log.warning(
                    "cannot load the tokenizer, trying again in %g s: %s: %s", pause_s, type(error).__name__, error
                )
                await asyncio.sleep(pause_s)
                pause_s = min(MOST_PAUSE_S, 2 * pause_s)

    async def _begun(self) -> asyncio.Task[Tokenizer | ByteTokenizer | None]:
        """Return the task that loads the tokenizer, and start it if there is none. Wait first until the swarm has provided the
        model's small files. The task's result is None if the checkpoint has no tokenizer. Raises NoRoute."""
        await self._client.limits()
        if self._loading is None:
            self._loading = self._tasks.spawn(self._load(), "tokenizer", awaited=True)
        return self._loading

    async def _load(self) -> Tokenizer | ByteTokenizer | None:
        try:
            tokenizer = await self._client.tokenizer()
            if isinstance(tokenizer, Tokenizer) and tokenizer.has_chat_template:
                renderer = tokenizer.renderer
                await asyncio.to_thread(lambda: (renderer.system_place, renderer.tool_place))  # trials take a while
                self.prompter = renderer
        except BaseException:
            self._loading = None  # the next request tries again
            raise
        return tokenizer


@dataclass(eq=False, repr=False)
class ServedModel:
    """Model of the gateway's API: a swarm's model, or that model with one adapter. `queue` is shared by all models of the gateway,
    `loader` by the models of one swarm. `parent` is the name of the swarm's own model if this one has an adapter, else None."""

    name: str
    client: SwarmClient
    loader: TokenizerLoader
    queue: FairQueue
    config: GatewayConfig
    adapter: str = ""
    parent: str | None = None
    _prompter: ChatRenderer | None = field(default=None, init=False)  # of an adapter, once a request has needed it

    def with_adapter(self, adapter: str) -> ServedModel:
        """Return the model that the adapter of this name makes of a swarm's own one."""
        return replace(self, name=f"{self.name}:{adapter}", adapter=adapter, parent=self.name)

    @property
    def missing(self) -> list[int]:
        """Units without a holder now."""
        return list(self.client.status()["missing"])

    def card(self) -> ModelCard:
        """Return the entry of this model for `/v1/models`."""
        manifest, prompter = self.client.manifest, self._prompter or self.loader.prompter
        return ModelCard(
            id=self.name,
            created=manifest.created,
            max_model_len=self.client.cached_positions,
            task=manifest.task,
            parent=self.parent,
            system_prompt=None if prompter is None else prompter.system_place,
            tool_prompt=None if prompter is None else prompter.tool_place,
            sampling=self.client.cached_defaults,
        )

    # -- text and ids

    async def tokenizer(self) -> Tokenizer | ByteTokenizer:
        """Return the swarm's tokenizer. Raises ApiError if the checkpoint of a language model has none, UsageError if the model is
        no language model, and what `TokenizerLoader.tokenizer` raises."""
        tokenizer = await self.loader.tokenizer()
        if tokenizer is None:
            self.client.check_language_model()
            raise bad_request(NO_TOKENIZER)
        return tokenizer

    async def prompter(self) -> ChatRenderer | None:
        """Return the renderer of conversations by the chat template of the model, or of its adapter if that has one; None if there
        is no template. Raises what `tokenizer` raises; NoRoute if no peer gives the adapter's template."""
        await self.tokenizer()
        if not self.adapter:
            return self.loader.prompter
        tokenizer = await self.client.tokenizer(self.adapter)
        self._prompter = None
        if isinstance(tokenizer, Tokenizer) and tokenizer.has_chat_template:
            self._prompter = tokenizer.renderer
        return self._prompter

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. A text of at most `SHORT_CHARS` is encoded in the event loop, because handing it to a
        thread takes longer. Raises ContextTooLong if the text cannot fit into the model's context."""
        tokenizer, limits = await self.tokenizer(), await self.client.limits()
        limits.check_text(len(text))
        read = partial(tokenizer.encode, text, special_tokens=special_tokens)
        return read() if len(text) <= SHORT_CHARS else await asyncio.to_thread(read)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: ToolUse = ToolUse(),
        variables: Mapping[str, Any] = MappingProxyType({}),
        ending: ChatEnding = ChatEnding.ANSWER,
    ) -> list[int]:
        """Return the prompt's token ids for a conversation: `messages`, the `tools` that the model may call, and further
        `variables` of its chat template. Raises ApiError if the model has no chat template or the template refuses the messages,
        UsageError if it is no language model, ContextTooLong if the whole prompt (messages, tools, calls and results as the
        template writes them) cannot fit."""
        self.client.check_language_model()
        if (prompter := await self.prompter()) is None:
            raise ApiError(
                "no_chat_template",
                f"{self.name} has no chat template, so it cannot read conversations: use /v1/completions",
            )
        limits = await self.client.limits()
        limits.check_text(sum(len(message["content"]) for message in messages))
        if ending is ChatEnding.CONTINUED and messages[-1].get("tool_calls"):
            raise bad_request("a message that calls tools cannot be continued: send the tools' results", "messages")
        try:
            turns, check = list(map(dict, messages)), limits.check_text
            return await asyncio.to_thread(prompter.encode, turns, tools.offered, variables, ending, check)
        except CheckpointError as error:  # templates refuse roles and orders that they do not know
            raise bad_request(str(error), "messages") from error

    # -- generating

    def check_count(self, prompts: int, asked: SamplingFields) -> None:
        """Raise ApiError if `prompts` prompts make more texts than the gateway's `max_choices`; called before any prompt is
        encoded."""
        most = self.config.max_choices
        if prompts * asked.texts > most:
            raise bad_request(f"a request may ask for at most {most} texts (n times the prompts): lower n", "n")

    async def choices(self, prompts: Sequence[list[int]], asked: SamplingFields, key: ApiKey) -> list[ChoiceStream]:
        """Return a stream for each text that the request asks for, prompt after prompt; generating begins when a stream is read.
        Raises ApiError, or UsageError for what the model cannot do, before any session begins."""
        self.check_count(len(prompts), asked)
        tokenizer, stop_ids = await self.loader.tokenizer(), await self.client.stop_ids(self.adapter)
        stops, tools = asked.stops, asked.tool_use
        if tokenizer is None and stops:
            raise bad_request(NO_TOKENIZER, "stop")
        own_stop_ids = tuple(asked.stop_token_ids or ())
        stop_ids = own_stop_ids if asked.ignore_eos else (*stop_ids, *own_stop_ids)
        grammar, defaults = asked.followed_grammar(), await self.client.generation_defaults()
        choices: list[ChoiceStream] = []
        for prompt in prompts:
            for choice in range(asked.texts):
                new_tokens = asked.new_tokens
                # bounded by the context, since a session reserves memory for all of its positions
                if new_tokens is None:
                    most = (await self.client.limits()).most_new_tokens(len(prompt))
                    new_tokens = max(1, min(self.config.default_new_tokens, most))
                options = GenerateOptions(
                    max_new_tokens=max(1, new_tokens),
                    stop_ids=stop_ids,
                    compress=self.config.compress,
                    drafts=self.config.drafts,
                    adapter=self.adapter,
                    **asked.drawing(choice, grammar, defaults),
                )
                parser = await self._parser(prompt, tools, is_free=grammar is None)
                stream: TextStream | NoTokens = await self.client.stream(
                    prompt,
                    options,
                    kept_for=key.name,
                    special_tokens=isinstance(parser, TemplateParser) or not asked.skip_special_tokens,
                    ignore_ends=asked.ignore_eos,
                )
                if not new_tokens:
                    stream = NoTokens()
                choices.append(
                    ChoiceStream(
                        len(choices),
                        stream,
                        stop_ids=stop_ids,
                        stops=stops,
                        parser=parser,
                        queue=self.queue,
                        key=key,
                        tokenizer=tokenizer,
                    )
                )
        return choices

    async def _parser(self, prompt: list[int], tools: ToolUse | None, *, is_free: bool) -> ResponseParser | None:
        """Return the parser of the answer to `prompt`; None if `tools` is None, as in a completion. If a grammar constrains the
        answer (`is_free` is False), the parser expects no reasoning."""
        if tools is None:
            return None
        tokenizer = await self.tokenizer()
        if self._prompter is not None and self.adapter:
            tokenizer = await self.client.tokenizer(self.adapter) or tokenizer
        if not is_free or isinstance(tokenizer, ByteTokenizer):
            return CommonParser(tools)
        if tokenizer.has_response_template:
            theirs = await asyncio.to_thread(tokenizer.response_parser, prompt, tools.offered)
            return TemplateParser(theirs, tools)
        if not tokenizer.reasons:
            return CommonParser(tools)
        end = tokenizer.decode(prompt[-PROMPT_END_TOKENS:], special_tokens=True)
        return CommonParser(tools, ReasoningParser(begun=end.rstrip().endswith(THINK_BEGIN)))


ADAPTERS_S = 20.0  # between looks for the adapters that members bring
SWEEP_S = 600.0  # between removals of expired responses


class Gateway:
    """Gateway to the swarms in `clients`, which are keyed by the names that the API serves them under. `swarms` are their models by
    name; `models` are these and one more model per adapter. Without a `home` no responses are kept."""

    def __init__(
        self,
        clients: Mapping[str, SwarmClient],
        keys: KeyRing | None = None,
        config: GatewayConfig = GatewayConfig(),
        *,
        home: Path | None = None,
    ) -> None:
        self.config = config
        self.responses = None if home is None else ResponseStore(home)
        self.readings: Counter[str] = Counter()  # of kept responses that are read now, by the key's name
        self.keys = keys or KeyRing()
        self.queue = FairQueue(running=config.running, waiting=config.waiting, wait_s=config.wait_s)
        self._tasks = Tasks("gateway", on_crash=None)
        self._is_loading = False
        self.swarms: dict[str, ServedModel] = {}
        self.models: dict[str, ServedModel] = {}
        for name, client in clients.items():
            self.add(name, client)

    def add(self, name: str, client: SwarmClient) -> None:
        """Serve one more swarm under `name`. Its tokenizer is loaded while `loading` lasts."""
        own = ServedModel(name, client, TokenizerLoader(client, self._tasks), self.queue, self.config)
        self.swarms[name] = self.models[name] = own
        self._add_adapters(map(own.with_adapter, client.manifest.adapter_names))
        if self._is_loading:
            self._tasks.spawn(own.loader.load(), f"loading of {name}")

    def _add_adapters(self, adapters: Iterable[ServedModel]) -> None:
        """Serve these models of adapters. A swarm wins if an adapter's model has its name."""
        self.models |= {model.name: model for model in adapters if model.name not in self.swarms}

    async def follow_adapters(self) -> None:
        """Serve the adapters that members have brought meanwhile, and those that are gone no longer."""
        for name, own in list(self.swarms.items()):
            if own.client.manifest.task != GENERATE:
                continue
            offered = {f"{name}:{adapter}": adapter for adapter in await own.client.adapters.offered()}
            gone = [model.name for model in self.models.values() if model.parent == name and model.name not in offered]
            for model in gone:
                del self.models[model]
            self._add_adapters(
                own.with_adapter(adapter) for model, adapter in offered.items() if model not in self.models
            )

    @contextlib.asynccontextmanager
    async def loading(self) -> AsyncIterator[None]:
        """Load the swarms' tokenizers in the background while the context lasts, and remove expired responses. Loading that is
        unfinished when the context ends is cancelled."""
        self._is_loading = True
        for name, model in self.swarms.items():
            self._tasks.spawn(model.loader.load(), f"loading of {name}")
        self._tasks.spawn(_repeat(self.follow_adapters, ADAPTERS_S), "follow adapters")
        if self.responses is not None:
            sweep = partial(asyncio.to_thread, self.responses.sweep)
            self._tasks.spawn(_repeat(sweep, SWEEP_S), "sweep of kept responses")
        try:
            yield
        finally:
            await self._tasks.close()

    def model(self, name: str) -> ServedModel:
        """Return the model called `name`; the only swarm's model if `name` is empty and the gateway has one swarm. Raises ApiError
        (404) if there is no such model, or if `name` is empty and there are several swarms."""
        if not name and len(self.swarms) == 1:
            return next(iter(self.swarms.values()))
        if name not in self.models:
            known = ", ".join(self.models) or "none, because no swarm has been reached yet"
            sentence = f"there is no model {name!r} here: choose one of {known}"
            if not name:
                sentence = f"the request names no model: choose one of {known}"
            raise ApiError("model_not_found", sentence, parameter="model")
        return self.models[name]


async def _repeat(deed: Callable[[], Awaitable[None]], pause_s: float) -> None:
    while True:
        await deed()
        await asyncio.sleep(pause_s)


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that received `request`."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def key_of(request: Request) -> ApiKey:
    """Return the API key of `request`, which the guard has put into the request's state."""
    key = request.state.key
    assert isinstance(key, ApiKey)
    return key
