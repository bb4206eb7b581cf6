"""The `langchain-openai` package against a gateway: `python contrib/clients/langchain_package.py URL MODEL`."""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from question import SCHEMA

COUNT: dict[str, Any] = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}


def main(url: str, model: str) -> None:
    """Try an answer, the same streamed, a batch, and a conversation with a tool. Raises AssertionError if an answer is wrong."""
    chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=100, max_retries=0)
    whole = chat.invoke("How are the hens?")
    assert "".join(piece.content for piece in chat.stream("How are the hens?")) == whole.content
    assert [one.content for one in chat.batch(["How are the hens?"] * 2)] == [whole.content] * 2
    said = [HumanMessage("How are the hens?")]
    called = chat.bind_tools([COUNT], tool_choice="count").invoke(said)
    [call] = called.tool_calls
    assert call["name"] == "count" and set(call["args"]) == {"hens"}
    result = ToolMessage("four", tool_call_id=call["id"])
    assert chat.bind_tools([COUNT]).invoke([*said, called, result]).usage_metadata["output_tokens"] > 0


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
