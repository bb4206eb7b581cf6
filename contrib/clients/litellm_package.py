"""The `litellm` package against a gateway: `python contrib/clients/litellm_package.py URL MODEL`."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm
from question import SAID, SCHEMA


def main(url: str, model: str) -> None:
    """Try an answer, the same streamed, a tool call, and a text completion. Raises AssertionError if an answer is wrong."""
    asked: Any = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "temperature": 0, "num_retries": 0}
    whole = litellm.completion(messages=SAID, max_tokens=16, **asked)
    chunks = litellm.completion(messages=SAID, max_tokens=16, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    tool = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
    forced = litellm.completion(messages=SAID, max_tokens=100, tools=[tool], tool_choice="required", **asked)
    assert set(json.loads(forced.choices[0].message.tool_calls[0].function.arguments)) == {"hens"}
    text = litellm.text_completion(
        **{**asked, "model": f"text-completion-openai/{model}"}, prompt="A hen", max_tokens=8
    )
    assert text.usage.completion_tokens == 8


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
