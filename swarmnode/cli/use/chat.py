"""`swarmnode chat`: a conversation with the model of a swarm."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from swarmnode.cli.options.asking import PATIENCE, TRUST, asking
from swarmnode.cli.options.option import option
from swarmnode.cli.options.sampling import SamplingOptions
from swarmnode.cli.options.swarm import SWARM
from swarmnode.cli.terminal.console import HOME, Verbosity, command, run_async, say, unless_stopped
from swarmnode.cli.terminal.typed_lines import TypedLines
from swarmnode.errors import SwarmnodeError

if TYPE_CHECKING:
    from swarmnode.client.conversation import Conversation
    from swarmnode.swarm.peers.trust import Trust

PROMPT = "> "
NEW = "/new"
HELP = f"Type what you want to say. {NEW} begins another conversation, Ctrl-D ends."


@command
def chat(
    *,
    swarm: str = SWARM,
    system: str = option("", "What the model shall be, as in 'You answer in rhymes.'"),
    sampling: Annotated[
        SamplingOptions,
        "max_new_tokens temperature top_p min_p frequency_penalty presence_penalty repetition_penalty logit_bias "
        "compress adapter",
    ] = SamplingOptions(max_new_tokens=512, temperature=0.7, top_p=0.9),
    trust: Trust = TRUST,
    patience: float = PATIENCE,
    home: Path = HOME,
    logs: Verbosity,
) -> None:
    """Talk with the model of a swarm, in the words that its chat template makes of a conversation; plain text where it has none.

    Example: swarmnode chat friends
    """
    logs.begin()
    from swarmnode.client.conversation import Conversation

    options = sampling.options()

    async def talk(stop: asyncio.Event) -> None:
        async with asking(swarm, home, patience_s=patience, trust=trust) as client:
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
