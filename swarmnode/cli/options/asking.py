"""Asking a swarm: the options of trust and patience, and a client that needs no torch."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.option import option
from swarmnode.cli.options.swarm import open_swarm
from swarmnode.cli.terminal.console import run_async
from swarmnode.cli.terminal.process import CollectorPause

if TYPE_CHECKING:
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.swarm.peers.standing import Trust


def patience_option(seconds: float, help_text: str) -> Any:
    """Define how long to wait, at most a week."""
    return option(seconds, help_text, "--patience", min=0.0, max=7 * 86_400.0, metavar="SECONDS")


def _trust(words: Sequence[str], _flag: str) -> Trust:
    from swarmnode.swarm.peers.standing import parse_trust

    return parse_trust(words)


PATIENCE = patience_option(60.0, "How long to wait for peers that hold the model.")
TRUST = option(
    [],
    "Let only these compute; see docs/security.md for what it protects. Repeatable.",
    "--trust",
    metavar="PEER|group:NAME|net:CIDR",
    parse=_trust,
)


def ask(swarm: str, home: Path, question: Callable[[SwarmClient], Any]) -> Any:
    """Join the swarm, return the result of `question`, and leave. Raises UsageError, NetworkDown, NotAdmitted."""
    from swarmnode.client.swarm_client import SwarmClient

    async def look(_stop: asyncio.Event) -> Any:
        async with await SwarmClient.join(open_swarm(swarm, home), home=home) as client:
            answer = question(client)
            return await answer if inspect.isawaitable(answer) else answer

    return run_async(look)


@contextlib.asynccontextmanager
async def asking(swarm: str, home: Path, *, patience_s: float, trust: Trust) -> AsyncIterator[SwarmClient]:
    """A client of the swarm that is meant, for one question or conversation. Raises UsageError, NetworkDown, NotAdmitted."""
    from swarmnode.client.swarm_client import SwarmClient

    with CollectorPause():
        loaded = open_swarm(swarm, home)
        client = await SwarmClient.join(loaded, home=home, patience_s=patience_s, trust=trust, audit_share=0.0)
    leave_torch_out()
    async with client:
        yield client


def leave_torch_out() -> None:
    """This process computes nothing, and transformers' tokenizers take a fourth of the time where they find no torch. Not for one
    that stays and audits what others have computed, which needs it."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it tells that it has not found it
