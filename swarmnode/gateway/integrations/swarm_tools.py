"""Tools of the Model Context Protocol (MCP) for a swarm, by its official SDK."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.client.tokenizer import Tokenizer, Turn
from swarmnode.data.conversation import SYSTEM
from swarmnode.errors import SwarmnodeError, UsageError
from swarmnode.gateway.generation.choice_stream import LENGTH, STOP
from swarmnode.measuring.trace import Timeline, parse_trace_id
from swarmnode.serving.client.generation import GenerateOptions, Generation
from swarmnode.swarm.records.manifest import CLASSIFY, EMBED, GENERATE, INFER
from swarmnode.version import __version__

MAX_TEXTS = 64  # an agent reads every result
MAX_NUMBERS = 4096


class ToolMessage(BaseModel):
    """Message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class SwarmTools:
    """Tools of a swarm for agents. An error of the swarm reaches the agent as text, by ToolError."""

    def __init__(self, client: SwarmClient) -> None:
        self._client = client

    def server(self, name: str) -> MCPServer:
        """Return an MCP server called `name`, with the tools that suit the task of the swarm's model."""
        manifest = self._client.manifest
        told = f"The swarm {name}: volunteers' machines that run a model together. It {manifest.purpose}."
        server = MCPServer(name, instructions=told, version=__version__)
        tools = {
            GENERATE: (self.chat, self.generate, self.trace),
            EMBED: (self.embed,),
            CLASSIFY: (self.classify,),
            INFER: (self.infer,),
        }
        for tool in (*tools.get(manifest.task, ()), self.status):
            server.add_tool(tool)
        return server

    async def chat(
        self,
        messages: list[ToolMessage],
        system: str = "",
        max_tokens: int = 512,
        stop: list[str] | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> dict[str, Any]:
        """Let the swarm's model answer a conversation by its chat template.

        `messages` are in order, the last one is the user's; `system` is a system text before them. The answer has at most
        `max_tokens` tokens and ends before the first of the `stop` strings. Without a temperature, the model's own sampling
        defaults apply. Returns the new text, why it ended ("stop" or "length"), the trace, and the machines that computed it.
        Raises ToolError if the model has no chat template.
        """
        turns = [Turn(message.role, message.content) for message in messages]
        if system:
            turns.insert(0, Turn(SYSTEM, system))
        with _as_tool_error():
            if not turns:
                raise UsageError("send at least one message")
            if not (await self._client.chat_tokenizer()).has_chat_template:
                raise UsageError("this model has no chat template, so it cannot read conversations: use generate")
            drawing: dict[str, Any] = {**await self._client.generation_defaults(), "seed": seed}
            if temperature is not None:
                drawing["temperature"] = temperature
            options = GenerateOptions(max_new_tokens=max_tokens, **drawing)
            return _written(await self._client.chat(turns, options, stop=stop or ()))

    async def generate(
        self,
        prompt: str,
        max_new_tokens: int = 128,
        stop: list[str] | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> dict[str, Any]:
        """Let the swarm's model continue a text, which ends before the first of the `stop` strings. Returns the new text, why it
        ended ("stop" or "length"), the trace, and the machines that computed it. Raises ToolError."""
        with _as_tool_error():
            options = GenerateOptions(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
            return _written(await self._client.generate(prompt, options, stop=stop or ()))

    async def embed(self, texts: list[str]) -> dict[str, list[list[float]]]:
        """Return the vector that the swarm's model makes of each text: texts with a similar meaning have vectors of a similar
        direction. Raises ToolError."""
        with _as_tool_error():
            _check_texts(texts)
            return {"vectors": [vector.tolist() for vector in await self._client.embed(texts)]}

    async def classify(self, texts: list[str]) -> dict[str, list[dict[str, float]]]:
        """Return for each text the probability of each of the model's classes. Raises ToolError."""
        with _as_tool_error():
            _check_texts(texts)
            return {"classes": await self._client.classify(texts)}

    async def infer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs of the swarm's module by name, as nested lists, for its `inputs` by name, as nested lists of numbers.
        Raises ToolError if the outputs have more than 4096 numbers, or if inputs are wrong: the error names the inputs and their
        shapes."""
        with _as_tool_error():
            outputs = await self._client.infer(inputs)
            numbers = sum(array.size for array in outputs.values())
            if numbers > MAX_NUMBERS:
                raise UsageError(
                    f"the output has {numbers} numbers, and a tool returns at most {MAX_NUMBERS}: send fewer samples at a time"
                )
        return {name: array.tolist() for name, array in outputs.items()}

    async def status(self) -> dict[str, Any]:
        """Return the machines of the swarm, the layers (units) of the model that each one holds, and the layers that no machine
        holds. For a language model, `max_model_len` is the number of tokens that prompt and answer may have, `chat_template` says
        whether it answers conversations, and `system_prompt` where system texts go; they are null while no machine tells."""
        template = await self._template() if self._client.manifest.task == GENERATE else {}
        return {**self._client.status(), **template}

    async def _template(self) -> dict[str, Any]:
        try:
            await self._client.limits()  # status has the number of positions after that
            tokenizer = await self._client.tokenizer()
        except SwarmnodeError:
            return {"chat_template": None, "system_prompt": None}
        if not isinstance(tokenizer, Tokenizer) or not tokenizer.has_chat_template:
            return {"chat_template": False, "system_prompt": None}
        place = await asyncio.to_thread(lambda: tokenizer.renderer.system_place)
        return {"chat_template": True, "system_prompt": place}

    async def trace(self, trace: str) -> dict[str, Any]:
        """Return where the time of a generation went: for each machine the tokens, and the median milliseconds of waiting and of
        computing per token. `trace` comes from a generation's result. Raises ToolError if it is malformed."""
        with _as_tool_error():
            trace_id = parse_trace_id(trace)
        return {
            "machines": [
                {
                    "peer": stop.peer,
                    "span": list(stop.span),
                    "tokens": len(stop.decoded),
                    "wait_ms": stop.wait_us.median / 1e3,
                    "compute_ms": stop.compute_us.median / 1e3,
                }
                for stop in Timeline(await self._client.traces(trace_id)).stops
            ]
        }


def _written(result: Generation) -> dict[str, Any]:
    return {
        "text": result.text,
        "tokens": len(result.ids),
        "finish_reason": STOP if result.whole else LENGTH,
        "trace": result.trace,
        "machines": [{"peer": hop.peer, "span": [hop.start, hop.end]} for hop in result.route],
    }


@contextlib.contextmanager
def _as_tool_error() -> Iterator[None]:
    try:
        yield
    except SwarmnodeError as error:
        raise ToolError(str(error)) from error


def _check_texts(texts: list[str]) -> None:
    """Raise UsageError if there is no text, or more than `MAX_TEXTS`."""
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise UsageError(f"you sent {len(texts)} texts: send 1 to {MAX_TEXTS} at once")
