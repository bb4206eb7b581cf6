"""The `anthropic` package against a gateway: `python contrib/clients/anthropic_package.py URL MODEL`."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
from question import SAID, SCHEMA


def main(url: str, model: str) -> None:
    """Try a message, the same streamed, a token count, and a conversation with a tool. Raises AssertionError if an answer is
    wrong."""
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        asked: Any = {"model": model, "messages": SAID, "max_tokens": 16, "extra_body": {"temperature": 0}}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            assert stream.get_final_message().content[0].text == whole.content[0].text
        assert client.messages.count_tokens(model=model, messages=SAID).input_tokens > 0
        tool: Any = {"name": "count", "input_schema": SCHEMA}
        forced = client.messages.create(**{**asked, "max_tokens": 100}, tools=[tool], tool_choice={"type": "any"})
        call = forced.content[0]
        assert forced.stop_reason == "tool_use" and set(call.input) == {"hens"}
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "four"}
        turns = [*SAID, {"role": "assistant", "content": forced.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(**{**asked, "messages": turns}, tools=[tool]).usage.output_tokens > 0


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
