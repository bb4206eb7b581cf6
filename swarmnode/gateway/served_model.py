"""A swarm as a model of the API, by itself or as an adapter changes it: prompts become token ids, and requests choices that it
generates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import MappingProxyType
from typing import Any

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.client.text_stream import TextStream
from swarmnode.client.tokenizer import ByteTokenizer, ChatEnding, Tokenizer
from swarmnode.errors import CheckpointError, NoRoute
from swarmnode.gateway.access.fair_queue import FairQueue
from swarmnode.gateway.access.keys import ApiKey
from swarmnode.gateway.config import GatewayConfig
from swarmnode.gateway.generation.chat_prompt import ChatPrompter
from swarmnode.gateway.generation.choice_stream import ChoiceStream, NoTokens
from swarmnode.gateway.generation.response_parser import THOUGHTS_BEGIN as THINK_BEGIN
from swarmnode.gateway.generation.response_parser import CommonParser, ReasoningParser, ResponseParser, TemplateParser
from swarmnode.gateway.generation.sampling_fields import SamplingFields
from swarmnode.gateway.generation.tool_use import ToolUse
from swarmnode.gateway.http.api_error import RETRY_S, ApiError, bad_request
from swarmnode.gateway.openai.replies import ModelCard
from swarmnode.net.tasks import Tasks
from swarmnode.serving.client.generation import GenerateOptions

log = logging.getLogger(__name__)

NO_TOKENIZER = "this swarm's checkpoint has no tokenizer, so it knows no text: give token ids to /v1/completions"
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0  # between attempts to load a tokenizer
SHORT_CHARS = 2048  # some 0.5 ms of a tokenizer
PROMPT_END_TOKENS = 8  # in which a template opens the reasoning


class TokenizerLoader:
    """That of the swarm of `client`. What loads it is one of `tasks`, however many wait for it."""

    def __init__(self, client: SwarmClient, tasks: Tasks) -> None:
        self._client = client
        self._tasks = tasks
        self._loading: asyncio.Task[Tokenizer | ByteTokenizer | None] | None = None
        self.prompter: ChatPrompter | None = None  # once the tokenizer is there, where it has a chat template

    def __repr__(self) -> str:
        return f"<TokenizerLoader of {self._client!r}{'' if self.is_done else ', loading'}>"

    @property
    def is_done(self) -> bool:
        """Whether it is there, or is known to be none."""
        return self._loading is not None and self._loading.done()

    async def tokenizer(self) -> Tokenizer | ByteTokenizer | None:
        """The checkpoint's own, as SwarmClient has it. Raises NoRoute where nobody gives its files within the client's patience,
        ApiError where it is not loaded by then, CheckpointError where it cannot be used."""
        if self._loading is not None and self._loading.done():
            return self._loading.result()
        loop, patience_s = asyncio.get_running_loop(), self._client.config.patience_s
        until_s = loop.time() + patience_s
        loading = await self._begun()
        try:
            return await asyncio.wait_for(asyncio.shield(loading), until_s - loop.time())
        except asyncio.TimeoutError:
            sentence = f"the model's tokenizer is still being loaded after {patience_s:g} s: ask again"
            raise ApiError(503, sentence, kind="server_error", code="loading", retry_s=RETRY_S) from None

    async def load(self) -> None:
        """Load it before anybody asks, as soon as its files are here. After a failure, try again."""
        pause_s = FIRST_PAUSE_S
        while not self.is_done:
            try:
                await asyncio.shield(await self._begun())
            except NoRoute:
                await self._client.changed()
            except Exception as error:  # a library's, too: /ready waits for this
                log.warning(
                    "the tokenizer is not loaded, next try in %g s: %s: %s", pause_s, type(error).__name__, error
                )
                await asyncio.sleep(pause_s)
                pause_s = min(MOST_PAUSE_S, 2 * pause_s)

    async def _begun(self) -> asyncio.Task[Tokenizer | ByteTokenizer | None]:
        """What loads it, once the swarm has given the model's small files. Raises NoRoute."""
        await self._client.limits()
        if self._loading is None:
            self._loading = self._tasks.spawn(self._load(), "tokenizer", awaited=True)
        return self._loading

    async def _load(self) -> Tokenizer | ByteTokenizer | None:
        try:
            tokenizer = await self._client.tokenizer()
            if isinstance(tokenizer, Tokenizer) and tokenizer.has_chat_template:
                self.prompter = await asyncio.to_thread(ChatPrompter, tokenizer)
        except BaseException:
            self._loading = None  # who asks next tries again
            raise
        return tokenizer


class ServedModel:
    """`queue` is shared with the other models of the gateway, and `loader` with those of the same swarm. `parent` is the name of
    the swarm's model alone, where this is one of its adapters."""

    def __init__(
        self,
        name: str,
        client: SwarmClient,
        loader: TokenizerLoader,
        queue: FairQueue,
        config: GatewayConfig,
        *,
        adapter: str = "",
        parent: str | None = None,
    ) -> None:
        self.name = name
        self.client = client
        self.loader = loader
        self.adapter = adapter
        self.parent = parent
        self._queue = queue
        self._config = config

    def __repr__(self) -> str:
        return f"<ServedModel {self.name} of {self.client!r}>"

    @property
    def missing(self) -> list[int]:
        """Units that nobody holds at the moment."""
        return list(self.client.status()["missing"])

    def card(self) -> ModelCard:
        """As clients list it."""
        manifest, prompter = self.client.manifest, self.loader.prompter
        return ModelCard(
            id=self.name,
            created=manifest.created,
            max_model_len=self.client.known_positions,
            task=manifest.task,
            parent=self.parent,
            system_prompt=None if prompter is None else prompter.system_place,
            tool_prompt=None if prompter is None else prompter.tool_place,
        )

    def place(self, key: ApiKey) -> AbstractAsyncContextManager[None]:
        """A place among those who are served at once, while the context lasts. Raises ApiError where none becomes free."""
        return self._queue.place(key)

    # -- text and ids

    async def tokenizer(self) -> Tokenizer | ByteTokenizer:
        """The checkpoint's own. Raises ApiError where it has none, UsageError where the model knows no text anyway."""
        tokenizer = await self.loader.tokenizer()
        if tokenizer is None:
            self.client.check_language_model()
            raise bad_request(NO_TOKENIZER)
        return tokenizer

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The ids of a text. A short one is read sooner than a thread takes it. Raises ContextTooLong."""
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
        """The ids of a conversation that the model is to answer, with the tools that it may call, and what else its template
        knows. Raises ApiError where it knows no conversations, UsageError where it is no language model, ContextTooLong."""
        self.client.check_language_model()
        await self.tokenizer()
        if (prompter := self.loader.prompter) is None:
            raise bad_request(
                f"{self.name} has no chat template, so it does not know how a conversation is written: use /v1/completions",
                code="no_chat_template",
            )
        limits = await self.client.limits()
        limits.check_text(sum(len(message["content"]) for message in messages))
        if ending is ChatEnding.CONTINUED and messages[-1].get("tool_calls"):
            raise bad_request("a message that calls tools has ended: give their results", "messages")
        try:
            return await asyncio.to_thread(prompter.encode, messages, tools, variables, ending)
        except CheckpointError as error:  # templates say so of roles and orders that they do not know
            raise bad_request(str(error), "messages") from error

    # -- generating

    def check_count(self, prompts: int, asked: SamplingFields) -> None:
        """Raise ApiError where so many prompts make too many texts: before any of them is read."""
        if prompts * asked.texts > self._config.max_choices:
            raise bad_request(
                f"at most {self._config.max_choices} texts at once are possible (n, times the prompts)", "n"
            )

    async def choices(self, prompts: Sequence[list[int]], asked: SamplingFields, key: ApiKey) -> list[ChoiceStream]:
        """What a request asks for, prompt after prompt, ready to be generated. Raises ApiError, and UsageError for what the model
        cannot do, before anything is sent to a peer."""
        self.check_count(len(prompts), asked)
        tokenizer, stop_ids, stops = await self.loader.tokenizer(), await self.client.stop_ids(), asked.stops
        if tokenizer is None and stops:
            raise bad_request(NO_TOKENIZER, "stop")
        tools = asked.tool_use
        own_stop_ids = tuple(asked.stop_token_ids or ())
        stop_ids = own_stop_ids if asked.ignore_eos else (*stop_ids, *own_stop_ids)
        grammar, defaults = asked.followed_grammar(), await self.client.generation_defaults()
        choices: list[ChoiceStream] = []
        for prompt in prompts:
            for choice in range(asked.texts):
                new_tokens = await self._new_tokens(len(prompt), asked.new_tokens)
                options = GenerateOptions(
                    max_new_tokens=max(1, new_tokens),
                    stop_ids=stop_ids,
                    compress=self._config.compress,
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
                        queue=self._queue,
                        key=key,
                        tokenizer=tokenizer,
                    )
                )
        return choices

    async def _parser(self, prompt: list[int], tools: ToolUse | None, *, is_free: bool) -> ResponseParser | None:
        """Of what follows this prompt of a chat. An answer that is not `is_free` to be whatever the model likes is JSON at once."""
        if tools is None:
            return None
        tokenizer = await self.tokenizer()
        if not is_free or isinstance(tokenizer, ByteTokenizer):
            return CommonParser(tools)
        if tokenizer.has_response_template:
            theirs = await asyncio.to_thread(tokenizer.response_parser, prompt, tools.offered)
            return TemplateParser(theirs, tools)
        if not tokenizer.reasons:
            return CommonParser(tools)
        end = tokenizer.decode(prompt[-PROMPT_END_TOKENS:], special_tokens=True)
        return CommonParser(tools, ReasoningParser(begun=end.rstrip().endswith(THINK_BEGIN)))

    async def _new_tokens(self, prompt_length: int, asked: int | None) -> int:
        """Who does not say how many gets some, and no more than fit: every session reserves memory for all of its positions."""
        if asked is not None:
            return asked
        limits = await self.client.limits()
        return max(1, min(self._config.default_new_tokens, limits.most_new_tokens(prompt_length)))
