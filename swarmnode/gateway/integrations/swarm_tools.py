"""A swarm as tools of the Model Context Protocol, with its official SDK."""

from __future__ import annotations

from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from swarmnode.client import SwarmClient
from swarmnode.codec.trace_messages import TRACE_ID_BYTES
from swarmnode.errors import SwarmnodeError
from swarmnode.roles.measuring.timeline import Stop, Timeline


class SwarmTools:
    """What agents may ask of a swarm. What fails is told in words, by ToolError."""

    def __init__(self, client: SwarmClient) -> None:
        self._client = client

    def __repr__(self) -> str:
        return f"<SwarmTools of {self._client!r}>"

    def server(self, name: str) -> MCPServer:
        """Of this name, with each of them."""
        told = f"The swarm {name}: machines of volunteers that hold a language model together."
        server = MCPServer(name, instructions=told)
        for tool in (self.generate, self.status, self.trace):
            server.add_tool(tool)
        return server

    async def generate(
        self, prompt: str, max_new_tokens: int = 128, temperature: float = 0.0, seed: int | None = None
    ) -> dict[str, Any]:
        """Let the swarm's model go on with a text. Tells the new text, its trace, and the machines that wrote it."""
        try:
            result = await self._client.generate(
                prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
            )
        except SwarmnodeError as error:
            raise ToolError(str(error)) from error
        machines = [{"peer": hop.peer, "span": [hop.start, hop.end]} for hop in result.route]
        return {"text": result.text, "tokens": len(result.ids), "trace": result.trace, "machines": machines}

    async def status(self) -> dict[str, Any]:
        """Who is in the swarm, what units of the model each machine holds, and which have nobody."""
        return self._client.status()

    async def trace(self, trace: str) -> dict[str, Any]:
        """Where the time of a generation went, by its trace: tokens at each machine, and their median milliseconds of waiting and
        computing there."""
        try:
            known = bytes.fromhex(trace)
        except ValueError:
            known = b""
        if len(known) != TRACE_ID_BYTES:
            raise ToolError(f"a trace is {2 * TRACE_ID_BYTES} hex digits, not {trace!r}")
        return {"machines": [_machine(stop) for stop in Timeline(await self._client.traces(known)).stops]}


def _machine(stop: Stop) -> dict[str, Any]:
    return {
        "peer": stop.peer,
        "span": list(stop.span),
        "tokens": len(stop.decoded),
        "wait_ms": stop.typical(lambda step: step.wait_us).median / 1e3,
        "compute_ms": stop.typical(lambda step: step.compute_us).median / 1e3,
    }
