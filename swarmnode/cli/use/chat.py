"""`swarmnode chat`: a conversation with the model of a swarm."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarmnode.cli.options.asking import PATIENCE, TRUST, asking
from swarmnode.cli.options.sampling import (
    ADAPTER,
    COMPRESS,
    FREQUENCY_PENALTY,
    LOGIT_BIAS,
    MIN_P,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    MaxNewTokens,
    Temperature,
    TopP,
    generate_options,
)
from swarmnode.cli.options.swarm import SWARM
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
    from swarmnode.client.conversation import Conversation

PROMPT = "> "
NEW = "/new"
HELP = f"Type what you want to say. {NEW} begins another conversation, Ctrl-D ends."


@reports_errors
def chat(
    context: typer.Context,
    swarm: str = SWARM,
    system: str = typer.Option("", "--system", help="What the model shall be, as in 'You answer in rhymes.'"),
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    min_p: float = MIN_P,
    frequency_penalty: float = FREQUENCY_PENALTY,
    presence_penalty: float = PRESENCE_PENALTY,
    repetition_penalty: float = REPETITION_PENALTY,
    logit_bias: list[str] = LOGIT_BIAS,
    compress: str = COMPRESS,
    adapter: str = ADAPTER,
    trust: list[str] = TRUST,
    patience: float = PATIENCE,
    home: Path = HOME,
    verbose: bool = VERBOSE,
) -> None:
    """Talk with the model of a swarm, in the words that its chat template makes of a conversation; plain text where it has none.

    Example: swarmnode chat friends
    """
    set_up_logging(verbose)
    from swarmnode.client.conversation import Conversation
    from swarmnode.swarm.peers.trust import parse_trust

    options, trusted = generate_options(context.params), parse_trust(trust)

    async def talk(stop: asyncio.Event) -> None:
        async with asking(swarm, default_home(home), patience_s=patience, trust=trusted) as client:
            await client.chat_tokenizer()  # raises where it cannot chat at all
            await unless_stopped(_talk(Conversation(client, options, system=system)), stop)

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
