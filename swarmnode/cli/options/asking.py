"""Commands that ask a swarm: their options of trust and patience, and a client that needs no torch."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.swarm import open_swarm
from swarmnode.terminal.console import CollectorPause, joined, run_async
from swarmnode.terminal.option import option
from swarmnode.terminal.progress import spinner

if TYPE_CHECKING:
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.swarm.records.announcement import Trust
    from swarmnode.swarm.storage.swarmfile import Swarm


def patience_option(seconds: float, help_text: str) -> Any:
    """Define the option --patience: `seconds` by default, at most a week."""
    return option(seconds, help_text, "--patience", min=0.0, max=7 * 86_400.0, metavar="SECONDS")


def _trust(words: Sequence[str], _flag: str) -> Trust:
    from swarmnode.swarm.records.announcement import parse_trust

    return parse_trust(words)


PATIENCE = patience_option(60.0, "How long to wait for machines that hold the model.")
TRUST = option(
    [],
    "Let only these machines compute; see docs/security.md. Repeatable.",
    "--trust",
    metavar="PEER|group:NAME|net:CIDR",
    parse=_trust,
)


def ask(swarm: str | Swarm, home: Path, question: Callable[[SwarmClient], Any]) -> Any:
    """Join the swarm (as the user named it, or opened already), return the result of `question`, awaited if it is awaitable, and
    leave. Raises UsageError, NetworkDown, NotAdmitted."""

    async def ask_client(stop: asyncio.Event) -> Any:
        loaded = open_swarm(swarm, home) if isinstance(swarm, str) else swarm
        with spinner(f"Joining {loaded.name}"):
            from swarmnode.client.swarm_client import SwarmClient

            client = await joined(SwarmClient.join(loaded, home=home), stop)
        async with client:
            answer = question(client)
            return await answer if inspect.isawaitable(answer) else answer

    return run_async(ask_client)


@contextlib.asynccontextmanager
async def asking(
    swarm: str, home: Path, stop: asyncio.Event, *, patience_s: float, trust: Trust, needs_torch: bool = False
) -> AsyncIterator[SwarmClient]:
    """Join the swarm, yield a client for one question or conversation, and leave. Raises UsageError, NetworkDown, NotAdmitted;
    Interrupted if `stop` is set before the swarm is joined."""
    with CollectorPause():
        loaded = open_swarm(swarm, home)
        with spinner(f"Joining {loaded.name}"):
            from swarmnode.client.swarm_client import SwarmClient  # takes seconds on a slow machine

            joining = SwarmClient.join(loaded, home=home, patience_s=patience_s, trust=trust, audit_share=0.0)
            client = await joined(joining, stop)
    if not needs_torch:
        leave_torch_out()
    async with client:
        yield client


def leave_torch_out() -> None:
    """Prevent this process from importing torch: it computes nothing, and transformers' tokenizers load in a fourth of the time
    without torch. Not for a process that stays and audits others' results, because audits need torch."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else transformers warns that torch is missing
