"""Tools of the Model Context Protocol (MCP) for a swarm, by its official SDK."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.codec.measuring_messages import TRACE_ID_BYTES
from swarmnode.errors import SwarmnodeError, UsageError
from swarmnode.measuring.timeline import Stop, Timeline
from swarmnode.swarm.records.manifest import CLASSIFY, EMBED, GENERATE, INFER

MAX_TEXTS = 64  # an agent reads every result
MAX_NUMBERS = 4096


class SwarmTools:
    """Tools of a swarm for agents. An error of the swarm reaches the agent as text, by ToolError."""

    def __init__(self, client: SwarmClient) -> None:
        self._client = client

    def __repr__(self) -> str:
        return f"<SwarmTools of {self._client!r}>"

    def server(self, name: str) -> MCPServer:
        """Return an MCP server called `name`, with the tools that suit the task of the swarm's model."""
        manifest = self._client.manifest
        told = f"The swarm {name}: volunteers' machines that run a model together. It {manifest.purpose}."
        server = MCPServer(name, instructions=told)
        for tool in (*self._by_task().get(manifest.task, ()), self.status):
            server.add_tool(tool)
        return server

    def _by_task(self) -> dict[str, tuple[Callable[..., Any], ...]]:
        return {
            GENERATE: (self.generate, self.trace),
            EMBED: (self.embed,),
            CLASSIFY: (self.classify,),
            INFER: (self.infer,),
        }

    async def generate(
        self, prompt: str, max_new_tokens: int = 128, temperature: float = 0.0, seed: int | None = None
    ) -> dict[str, Any]:
        """Let the swarm's model continue a text. Returns the new text, the trace, and the machines that computed it. Raises
        ToolError."""
        with _told_in_words():
            result = await self._client.generate(
                prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
            )
        machines = [{"peer": hop.peer, "span": [hop.start, hop.end]} for hop in result.route]
        return {"text": result.text, "tokens": len(result.ids), "trace": result.trace, "machines": machines}

    async def embed(self, texts: list[str]) -> dict[str, list[list[float]]]:
        """Return the vector that the swarm's model makes of each text: texts with a similar meaning have vectors of a similar
        direction. Raises ToolError."""
        with _told_in_words():
            _check_texts(texts)
            return {"vectors": [vector.tolist() for vector in await self._client.embed(texts)]}

    async def classify(self, texts: list[str]) -> dict[str, list[dict[str, float]]]:
        """Return for each text the probability of each of the model's classes. Raises ToolError."""
        with _told_in_words():
            _check_texts(texts)
            return {"classes": await self._client.classify(texts)}

    async def infer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs of the swarm's module by name, as nested lists, for its `inputs` by name, as nested lists of numbers.
        Raises ToolError if the outputs have more than 4096 numbers, or if inputs are wrong: the error names the inputs and their
        shapes."""
        with _told_in_words():
            outputs = await self._client.infer(inputs)
            numbers = sum(array.size for array in outputs.values())
            if numbers > MAX_NUMBERS:
                raise UsageError(
                    f"the output has {numbers} numbers, and a tool returns at most {MAX_NUMBERS}: send fewer samples at a time"
                )
        return {name: array.tolist() for name, array in outputs.items()}

    async def status(self) -> dict[str, Any]:
        """Return the machines of the swarm, the layers (units) of the model that each one holds, and the layers that no machine
        holds."""
        return self._client.status()

    async def trace(self, trace: str) -> dict[str, Any]:
        """Return where the time of a generation went: for each machine the tokens, and the median milliseconds of waiting and of
        computing per token. `trace` comes from a generation's result. Raises ToolError if it is malformed."""
        try:
            known = bytes.fromhex(trace)
        except ValueError:
            known = b""
        if len(known) != TRACE_ID_BYTES:
            raise ToolError(f"a trace is {2 * TRACE_ID_BYTES} hex digits, not {trace!r}")
        return {"machines": [_machine(stop) for stop in Timeline(await self._client.traces(known)).stops]}


@contextlib.contextmanager
def _told_in_words() -> Iterator[None]:
    try:
        yield
    except SwarmnodeError as error:
        raise ToolError(str(error)) from error


def _check_texts(texts: list[str]) -> None:
    """Raise UsageError if there is no text, or more than `MAX_TEXTS`."""
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise UsageError(f"you sent {len(texts)} texts: send 1 to {MAX_TEXTS} at once")


def _machine(stop: Stop) -> dict[str, Any]:
    return {
        "peer": stop.peer,
        "span": list(stop.span),
        "tokens": len(stop.decoded),
        "wait_ms": stop.typical(lambda step: step.wait_us).median / 1e3,
        "compute_ms": stop.typical(lambda step: step.compute_us).median / 1e3,
    }
