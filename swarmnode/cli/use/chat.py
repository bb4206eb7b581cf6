"""Command `swarmnode chat`: a conversation with the model of a swarm."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from swarmnode.cli.options.asking import PATIENCE, TRUST, asking
from swarmnode.cli.options.option import option
from swarmnode.cli.options.sampling import SamplingOptions
from swarmnode.cli.options.swarm import SWARM
from swarmnode.cli.terminal.console import HOME, Verbosity, command, run_async, say, unless_stopped
from swarmnode.errors import SwarmnodeError

if TYPE_CHECKING:
    from swarmnode.client.conversation import Conversation
    from swarmnode.swarm.peers.standing import Trust

PROMPT = "> "
NEW = "/new"
HELP = f"Type a message. {NEW} starts a new conversation, Ctrl-D ends this one."
STANDARD_INPUT = 0
PIECE_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20  # a longer line is split


class TypedLines:
    """Reader of typed lines, one at a time, so that lines which have not been asked for stay in the pipe.

    The waiting thread is a daemon and reads the descriptor itself: a thread inside `input()` would keep the interpreter from
    ending.
    """

    def __init__(self, descriptor: int = STANDARD_INPUT) -> None:
        self._descriptor = descriptor
        self._read = bytearray()

    def __repr__(self) -> str:
        return f"<TypedLines of descriptor {self._descriptor}>"

    async def next(self) -> str | None:
        """Return the next line without its line break; None at the end of the input."""
        loop = asyncio.get_running_loop()
        line: asyncio.Future[str | None] = loop.create_future()

        def resolve(text: str | None) -> None:
            if not line.done():
                line.set_result(text)

        def wait() -> None:
            text = self._line()
            if not loop.is_closed():
                loop.call_soon_threadsafe(resolve, text)

        threading.Thread(target=wait, name="swarmnode-typed", daemon=True).start()
        return await line

    def _line(self) -> str | None:
        while (end := self._read.find(b"\n")) < 0 and len(self._read) < MAX_LINE_BYTES:
            piece = self._piece()
            if not piece:
                break
            self._read += piece
        if not self._read:
            return None
        whole = end >= 0
        line = self._read[: end if whole else MAX_LINE_BYTES]
        del self._read[: len(line) + whole]
        return line.decode(errors="replace").rstrip("\r")

    def _piece(self) -> bytes:
        """Return the bytes that have arrived; empty at the end of the input, and if the terminal is gone."""
        try:
            return os.read(self._descriptor, PIECE_BYTES)
        except OSError:
            return b""


@command
def chat(
    *,
    swarm: str = SWARM,
    system: str = option("", "Instructions for the model, as in 'Answer in rhymes.'"),
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
    """Chat with the model of a swarm. Without a chat template, the model continues your messages as plain text.

    Example: swarmnode chat friends
    """
    logs.begin()
    from swarmnode.client.conversation import Conversation

    options = sampling.options()

    async def talk(stop: asyncio.Event) -> None:
        async with asking(swarm, home, patience_s=patience, trust=trust) as client:
            await client.chat_tokenizer()  # raises UsageError if it cannot chat
            await unless_stopped(_talk(Conversation(client, options, system=system)), stop)

    run_async(talk)


async def _talk(conversation: Conversation) -> None:
    """Chat until the input ends. If an answer fails, print the error and go on without that answer."""
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
