"""Command `swarmnode chat`: a conversation with the model of a swarm."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from swarmnode.cli.options.sampling_options import SamplingOptions
from swarmnode.cli.options.swarm import PATIENCE, SWARM, TRUST, asking
from swarmnode.cli.use.generate import generation_json, tell_missing
from swarmnode.client.tokenizer import Turn
from swarmnode.data.conversation import SYSTEM
from swarmnode.errors import SwarmnodeError
from swarmnode.net.tasks import cancel_and_wait
from swarmnode.terminal.console import (
    HOME,
    STANDARD_INPUT,
    Verbosity,
    command,
    fail,
    is_piped,
    print_json,
    read_line,
    read_text,
    run_async,
    say,
    unless_stopped,
)
from swarmnode.terminal.formatting import one_line
from swarmnode.terminal.option import option
from swarmnode.terminal.progress import spinner

if TYPE_CHECKING:
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.client.text_stream import GeneratedText, TextStream
    from swarmnode.serving.client.generation import GenerateOptions, Generation
    from swarmnode.swarm.records.announcement import Trust

PROMPT, MORE = "> ", ". "
QUOTES = '"""'
COMMANDS = {
    "/help": "Show this list.",
    "/system TEXT": 'Set the system text. /system shows it, and /system "" removes it.',
    "/clear": "Forget the conversation, but not the system text.",
    "/bye": "End the chat, as Ctrl-D does.",
}
SYNONYMS = {"/?": "/help", "/exit": "/bye", "/quit": "/bye", "/new": "/clear"}
HELP = "\n".join(
    [
        *(f"  {name:<14}{told}" for name, told in COMMANDS.items()),
        f"{QUOTES} begins a message of several lines, and ends it. Ctrl-C stops an answer.",
        "To send a text that begins with /, put a space before it.",
    ]
)
NO_TEMPLATE = (
    "This model has no chat template: it was not trained to answer, so it continues your messages as plain text. "
    "`swarmnode generate` continues a single text."
)
DESCRIPTOR = 0  # of standard input
MAX_PIPED_BYTES = 1 << 24
KEPT_FOR = "conversations"  # owner of the kept caches
PIECE_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20  # a longer line is split


class TypedLines:
    """Reader of typed lines, one at a time, so that lines which have not been asked for stay in the pipe.

    The waiting thread is a daemon and reads the descriptor itself: a thread inside `input()` would keep the interpreter from
    ending.
    """

    def __init__(self, descriptor: int = DESCRIPTOR) -> None:
        self._descriptor = descriptor
        self._read = bytearray()

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


class Conversation:
    """Conversation with one answer at a time. If the caller stops reading an answer, the part that was read becomes the model's
    turn."""

    def __init__(self, client: SwarmClient, options: GenerateOptions | None = None, *, system: str = "") -> None:
        """`system` is a system text, for models that know that role; empty for none."""
        self._client = client
        self._options = options
        self.turns: list[Turn] = []
        self.system = system
        self.result: Generation | None = None  # of the latest answer; None if it has not begun

    @property
    def system(self) -> str:
        """System text; empty if there is none. A new text replaces the old one, and the other turns stay."""
        return "".join(turn.content for turn in self.turns[:1] if turn.role == SYSTEM)

    @system.setter
    def system(self, text: str) -> None:
        begin = [Turn(SYSTEM, text)] if text else []
        self.turns = [*begin, *(turn for turn in self.turns if turn.role != SYSTEM)]

    def forget(self) -> None:
        """Start again, with only the system text."""
        self.turns = [turn for turn in self.turns if turn.role == SYSTEM]

    async def ask(self, text: str) -> AsyncGenerator[GeneratedText, None]:
        """Send `text` as the user's next turn and return the answer as a stream of pieces. Raises what `SwarmClient.stream_chat`
        raises; the conversation is then unchanged."""
        self.result = None
        asked = [*self.turns, Turn("user", text)]
        stream = await self._client.stream_chat(asked, self._options, kept_for=KEPT_FOR)
        self.result = stream.result
        return self._listen(asked, stream)

    async def _listen(self, asked: list[Turn], stream: TextStream) -> AsyncGenerator[GeneratedText, None]:
        heard = ""
        try:
            async for piece in stream:
                heard += piece.text or ""
                yield piece
        finally:
            self.turns = [*asked, Turn("assistant", heard)]


@command
def chat(
    *,
    swarm: str = SWARM,
    system: str = option("", "Instructions for the model, as in 'Answer in rhymes.'"),
    sampling: Annotated[
        SamplingOptions,
        "max_new_tokens temperature top_p min_p frequency_penalty presence_penalty repetition_penalty logit_bias "
        "compress drafts adapter",
    ] = SamplingOptions(max_new_tokens=512, temperature=0.7, top_p=0.9),
    trust: Trust = TRUST,
    patience: float = PATIENCE,
    home: Path = HOME,
    as_json: bool = option(False, "Print each answer as JSON.", "--json"),
    logs: Verbosity,
) -> None:
    """Chat with the model of a swarm.

    /help lists the commands. In a pipe, all of standard input is one message, and the answer is printed alone: echo hi | swarmnode
    chat friends. Without a chat template, the model continues your messages as plain text.

    Example: swarmnode chat friends
    """
    logs.begin()
    if swarm == STANDARD_INPUT:
        swarm = read_line()
    options = sampling.options()
    message = read_text(MAX_PIPED_BYTES) if is_piped() else None
    if message is not None and not message.strip():
        fail("standard input was empty: pipe a message into this command", 2)

    async def talk(stop: asyncio.Event) -> bool:
        """Return False if the user interrupted the answer to a pipe, else True."""
        async with asking(
            swarm, home, stop, patience_s=patience, trust=trust, needs_torch=sampling.needs_torch
        ) as client:
            dialogue = Dialogue(client, options, system=system, as_json=as_json)
            await dialogue.check_model()
            if message is not None:
                await unless_stopped(dialogue.write(message), stop)
                return not stop.is_set()
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, dialogue.interrupt)
            await unless_stopped(dialogue.converse(TypedLines()), stop)
            return True

    if not run_async(talk):
        fail("interrupted")


class Dialogue:
    """Conversation between the user of a terminal and the model of the swarm that `client` has joined. With `as_json` each answer
    is a JSON object."""

    def __init__(
        self, client: SwarmClient, options: GenerateOptions, *, system: str = "", as_json: bool = False
    ) -> None:
        self._client = client
        self._conversation = Conversation(client, options, system=system)
        self._options = options
        self._as_json = as_json
        self._answer: asyncio.Task[None] | None = None  # that is being written
        self._interrupted = False

    async def check_model(self) -> None:
        """Say so if the model has no chat template. Raises UsageError if it cannot chat at all, NoRoute if no peer provides its
        tokenizer."""
        with spinner("Loading the tokenizer", quiet=self._as_json):
            tokenizer = await self._client.chat_tokenizer(self._options.adapter if self._options else "")
        if not tokenizer.has_chat_template:
            say(NO_TEMPLATE, err=True)

    async def converse(self, lines: TypedLines) -> None:
        """Chat until the input ends. If an answer fails, print the error and go on without that answer."""
        name = one_line(self._client.manifest.name)
        say(f"Chat with {name}: type a message. /help lists the commands, Ctrl-D or /bye ends.", err=True)
        while (message := await _message(lines)) is not None:
            name, _, rest = message.partition(" ")
            name = SYNONYMS.get(name, name)
            if name == "/bye":
                return
            if message.startswith("/"):
                self._execute(name, rest.strip())
            elif message.strip():
                await self._stoppable(message.strip())

    async def write(self, message: str) -> None:
        """Print the answer to `message` as it comes, or as JSON at its end. Raises what `SwarmClient.stream_chat` raises."""
        with spinner("Waiting for the first word", quiet=self._as_json):
            async for piece in await self._conversation.ask(message):
                if not self._as_json:
                    say(piece.text or "", nl=False)
        if self._as_json:
            print_json(generation_json(self._conversation.result))
        else:
            say()

    def interrupt(self) -> None:
        """Stop the answer that is being written. If there is none, or the user has stopped it already, ask the process to end."""
        if self._answer is not None and not self._interrupted:
            self._interrupted = True
            self._answer.cancel()
        else:
            signal.raise_signal(signal.SIGTERM)  # the usual end; a further one ends it at once

    def _execute(self, name: str, rest: str) -> None:
        """Carry out a typed command other than /bye, or say that there is none of this name."""
        if name == "/help":
            say(HELP, err=True)
        elif name == "/clear":
            self._conversation.forget()
            say("The conversation is forgotten.", err=True)
        elif name != "/system":
            say(f"There is no command {one_line(name)}. There are:\n{HELP}", err=True)
        elif not rest:
            say(self._conversation.system or "There is no system text.", err=True)
        else:
            quoted = len(rest) > 1 and rest[0] == rest[-1] == '"'
            self._conversation.system = rest[1:-1] if quoted else rest
            say("The system text is set." if self._conversation.system else "The system text is removed.", err=True)

    async def _stoppable(self, message: str) -> None:
        """Write the answer to `message`, unless `interrupt` stops it, and then its speed. Print an error of the swarm."""
        tell_missing(self._client)
        self._answer, self._interrupted = asyncio.ensure_future(self.write(message)), False
        try:
            await asyncio.wait({self._answer})
            result = self._conversation.result
            if not self._as_json and result is not None and result.ids:
                if self._answer.cancelled() or self._answer.exception() is not None:
                    say()  # the line of the text that was begun
                say(self._speed_text(result), err=True)
            if not self._answer.cancelled():
                self._answer.result()
        except SwarmnodeError as error:
            say(f"error: {error}", err=True)
        finally:
            await cancel_and_wait(self._answer)
            self._answer = None

    def _speed_text(self, result: Generation) -> str:
        """Return the speed of an answer, with the machines that computed it: their names, or the ends of their ids."""
        names = {peer["peer"]: one_line(peer["name"]) for peer in self._client.status()["peers"]}
        machines = dict.fromkeys(hop.peer for hop in result.route)
        by = ", ".join(names.get(peer) or peer[-8:] for peer in machines)
        speed = result.tokens_per_s
        return f"[{speed:.{0 if speed >= 100 else 1}f} tokens/s, written by {by}]"


async def _message(lines: TypedLines) -> str | None:
    """Ask for the next message: one line, or the lines between two `QUOTES`, which get a space before them, because they are no
    command. Returns None at the end of the input."""
    say(PROMPT, nl=False, err=True)
    line = await lines.next()
    if line is None or not line.startswith(QUOTES):
        return line
    said = [" " + line[len(QUOTES) :]]
    while not said[-1].endswith(QUOTES):
        say(MORE, nl=False, err=True)
        line = await lines.next()
        if line is None:
            return "\n".join(said)
        said.append(line)
    return "\n".join(said)[: -len(QUOTES)]
