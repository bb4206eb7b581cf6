"""A swarm as tools of agents, called as the MCP SDK calls them."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.version import __version__
from tests.gateway.conftest import MODEL, found_on, serving
from tests.gateway.speaking import save_speaking_llama
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded


@in_virtual_time
async def test_agents_generate_look_and_trace(founded: Founded, tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install 'swarmnode[mcp]'")
    from mcp.server.mcpserver.exceptions import ToolError

    from swarmnode.gateway.integrations.swarm_tools import SwarmTools

    async with serving(founded, tmp_path) as served:
        tools = SwarmTools(served.client)
        server = tools.server("friends")
        offered = {tool.name: tool for tool in await server.list_tools()}
        assert set(offered) == {"chat", "generate", "status", "trace"} and "prompt" in str(
            offered["generate"].input_schema
        )
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


@in_virtual_time
async def test_agents_chat_by_the_models_template(founded: Founded, tmp_path: Path) -> None:
    """The SDK's own client calls the server, as an agent does."""
    mcp = pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install 'swarmnode[mcp]'")
    from swarmnode.gateway.integrations.swarm_tools import SwarmTools

    async with serving(founded, tmp_path) as served, mcp.Client(SwarmTools(served.client).server("friends")) as agent:
        assert (agent.server_info.name, agent.server_info.version) == ("friends", __version__)
        status = (await agent.call_tool("status", {})).structured_content
        limit = await served.client.limits()
        assert status["chat_template"] is True and status["system_prompt"] == "template"
        assert status["max_model_len"] == limit.positions
        asked = [{"role": "user", "content": "How are the hens?"}]
        ask = {"messages": asked, "system": "Be short.", "max_tokens": 24, "temperature": 0}
        said = (await agent.call_tool("chat", ask)).structured_content
        theirs = [{"role": "system", "content": "Be short."}, *asked]
        chat = await served.openai.chat.completions.create(model=MODEL, messages=theirs, max_tokens=24, temperature=0)
        text = chat.choices[0].message.content
        assert (said["text"], said["tokens"], said["finish_reason"]) == (text, 24, "length")
        assert [machine["span"] for machine in said["machines"]] == [[0, 4]]
        stopped = (await agent.call_tool("chat", {**ask, "stop": [text[3:7]]})).structured_content
        assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(text[3:7])], "stop")
        for wrong, words in (
            ({"messages": []}, "at least one message"),
            ({"messages": [{"role": "cook", "content": "hi"}]}, "role"),
            ({"messages": asked, "max_tokens": 10**6}, "do not fit"),
            ({"messages": asked, "stop": ["x"] * 17}, "at most 16"),
        ):
            refused = await agent.call_tool("chat", wrong)
            assert refused.is_error and words in refused.content[0].text, refused.content


@in_virtual_time
async def test_a_model_without_a_template_does_not_chat(tmp_path: Path) -> None:
    mcp = pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install 'swarmnode[mcp]'")
    from swarmnode.gateway.integrations.swarm_tools import SwarmTools

    save_speaking_llama(tmp_path / "model", chat_template=None)
    async with (
        serving(found_on(tmp_path / "model", tmp_path / "founded"), tmp_path) as served,
        mcp.Client(SwarmTools(served.client).server("friends")) as agent,
    ):
        assert (await agent.call_tool("status", {})).structured_content["chat_template"] is False
        refused = await agent.call_tool("chat", {"messages": [{"role": "user", "content": "hi"}]})
        assert refused.is_error and "no chat template" in refused.content[0].text
