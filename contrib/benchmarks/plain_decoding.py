"""Clients and gateways for benchmarks, whose texts are decoded without drafts.

A random model repeats itself, so nearly all drafts from its own text are right. Then several tokens come out of one step, and
tokens/s and times between tokens say nothing about a step. Every script that generates text through a swarm therefore gets its
client from `PlainClient` or `joined`, and its gateway from `start_gateway`. A row about drafts names their source as the keyword
`drafts`.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.client.text_stream import TextStream
from swarmnode.codec.messages import NO_DRAFTS
from swarmnode.localswarm import LocalSwarm
from swarmnode.serving.client.generation import GenerateKeywords, GenerateOptions
from swarmnode.swarm.storage.swarmfile import load_swarm

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PlainClient(SwarmClient):
    """Client whose `stream`, `generate`, `chat` and `stream_chat` use drafts only if the keyword `drafts` names their source."""

    async def stream(
        self,
        prompt: str | Sequence[int],
        options: GenerateOptions | None = None,
        *,
        special_tokens: bool = False,
        ignore_ends: bool = False,
        kept_for: str | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> TextStream:
        """Generate a continuation as `SwarmClient.stream` does. `options.drafts` is ignored."""
        options = dataclasses.replace(options or GenerateOptions(), drafts=NO_DRAFTS)
        return await super().stream(
            prompt, options, special_tokens=special_tokens, ignore_ends=ignore_ends, kept_for=kept_for, **keywords
        )


async def joined(local: LocalSwarm, nodes: int) -> PlainClient:
    """Join the swarm, and return the client once it sees `nodes` nodes that serve layers."""
    client = await PlainClient.join(load_swarm(local.file), home=local.folder / "client")
    assert isinstance(client, PlainClient)
    while sum(peer["state"] == "ready" and peer["span"][1] > 0 for peer in client.status()["peers"]) < nodes:
        await client.changed()
    gc.freeze()  # else a collection over all objects of model making takes a third of a second of the timed part
    return client


def start_gateway(local: LocalSwarm) -> str:
    """Start a gateway to the swarm, and return the address of its API once it serves."""
    return str(local.server("gateway", "--port", "0", "--drafts", NO_DRAFTS).wait_for("serving")["url"])
