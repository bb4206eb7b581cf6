"""`swarmnode chat`: a conversation with the model of a swarm."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarmnode.cli.options.asking import TRUST, leave_torch_out
from swarmnode.cli.options.sampling import (
    FREQUENCY_PENALTY,
    LOGIT_BIAS,
    MIN_P,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    parse_logit_bias,
)
from swarmnode.cli.options.swarm import SWARM, open_swarm
from swarmnode.cli.terminal.collector import CollectorPause
from swarmnode.cli.terminal.console import (
    HOME,
    VERBOSE,
    default_home,
    reports_errors,
    run_async,
    say,
    set_up_logging,
    unless_stopped,
)
from swarmnode.cli.terminal.typed_lines import TypedLines
from swarmnode.errors import SwarmnodeError

if TYPE_CHECKING:
    from swarmnode.conversation import Conversation

PROMPT = "> "
NEW = "/new"
HELP = f"Type what you want to say. {NEW} begins another conversation, Ctrl-D ends."


@reports_errors
def chat(
    swarm: str = SWARM,
    system: str = typer.Option("", "--system", help="What the model shall be, as in 'You answer in rhymes.'"),
    max_new_tokens: int = typer.Option(512, "--max-new-tokens", "-n", help="How long an answer may be, in tokens."),
    temperature: float = typer.Option(
        0.7, "--temperature", help="0 takes the most likely token; higher is more random."
    ),
    top_p: float = typer.Option(0.9, "--top-p", help="Draw from the most likely tokens that make up this probability."),
    min_p: float = MIN_P,
    frequency_penalty: float = FREQUENCY_PENALTY,
    presence_penalty: float = PRESENCE_PENALTY,
    repetition_penalty: float = REPETITION_PENALTY,
    logit_bias: list[str] = LOGIT_BIAS,
    trust: list[str] = TRUST,
    patience: float = typer.Option(60.0, "--patience", help="Seconds to wait for peers that hold the model."),
    home: Path = HOME,
    verbose: bool = VERBOSE,
) -> None:
    """Talk with the model of a swarm, in the words that its chat template makes of a conversation; plain text where it has none.

    Example: swarmnode chat friends
    """
    set_up_logging(verbose)
    from swarmnode.client import SwarmClient
    from swarmnode.conversation import Conversation
    from swarmnode.roles.serving.client.generation import GenerateOptions
    from swarmnode.swarm.peers.trust import parse_trust

    options = GenerateOptions(
        max_new_tokens,
        temperature,
        top_p,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=parse_logit_bias(logit_bias),
    )
    trusted = parse_trust(trust)

    async def talk(stop: asyncio.Event) -> None:
        pause = CollectorPause()
        loaded = open_swarm(swarm, default_home(home))
        client = await SwarmClient.join(loaded, home=default_home(home), patience_s=patience, trust=trusted)
        pause.end()
        leave_torch_out()
        try:
            await unless_stopped(_talk(Conversation(client, options, system=system)), stop)
        finally:
            await client.close()

    run_async(talk)


async def _talk(conversation: Conversation) -> None:
    """Until there is no line any more. Where an answer fails, it is said, and the conversation goes on without it."""
    lines, terminal = TypedLines(), sys.stdin.isatty()
    if terminal:
        say(HELP, err=True)
    while True:
        if terminal:
            say(PROMPT, nl=False, err=True)
        line = await lines.next()
        if line is None:
            return
        if line == NEW:
            conversation.forget()
        elif line.strip():
            await _answer(conversation, line)


async def _answer(conversation: Conversation, line: str) -> None:
    try:
        async for piece in await conversation.ask(line):
            say(piece.text or "", nl=False)
    except SwarmnodeError as error:
        say(f"error: {error}", err=True)
    else:
        say()
