"""Use a swarm as a model of LangChain: `python examples/langchain_chat.py [ADDRESS MODEL]` beside `swarmnode serve`.

Needs `langchain-openai`.
"""

from __future__ import annotations

import sys

from langchain_openai import ChatOpenAI


def main(url: str = "http://127.0.0.1:8000/v1", model: str = "friends") -> None:
    """Print the answer of `model` at the gateway `url`, piece by piece."""
    for piece in ChatOpenAI(base_url=url, api_key="none", model=model, max_tokens=100).stream("How are the hens?"):
        print(piece.content, end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
