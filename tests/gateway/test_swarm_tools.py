"""A swarm as tools of agents, called as the MCP SDK calls them."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.version import missing_package
from tests.gateway.conftest import serving
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded


@in_virtual_time
async def test_agents_generate_look_and_trace(founded: Founded, tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason=missing_package("mcp"))
    from mcp.server.mcpserver.exceptions import ToolError

    from swarmnode.gateway.integrations.swarm_tools import SwarmTools

    async with serving(founded, tmp_path) as served:
        tools = SwarmTools(served.client)
        server = tools.server("friends")
        offered = {tool.name: tool for tool in await server.list_tools()}
        assert set(offered) == {"generate", "status", "trace"} and "prompt" in str(offered["generate"].input_schema)
        said = await tools.generate("hens", max_new_tokens=8)
        assert said["text"] == (await served.client.generate("hens", max_new_tokens=8)).text and said["tokens"] == 8
        assert [machine["span"] for machine in said["machines"]] == [[0, 4]]
        assert (await tools.status())["covered"]
        traced = await tools.trace(said["trace"])
        assert traced["machines"][0]["tokens"] > 0 and traced["machines"][0]["compute_ms"] > 0
        assert await tools.trace("0" * 32) == {"machines": []}
        for call in (
            tools.trace("hello"),
            tools.generate("", max_new_tokens=8),
            tools.generate("hens", max_new_tokens=0),
        ):
            with pytest.raises(ToolError):
                await call
