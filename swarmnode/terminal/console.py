"""Functions that all commands share: the event loop, Ctrl-C, logging, printing of results and errors.

Standard input: a prompt from a pipe, or a line such as an invite, which then does not show in the list of processes.

Process of a command: the garbage collector, paused during the start, and the restart of the command in its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn, TypeVar

import typer

from swarmnode.errors import ADVICE, ExecutorDied, SwarmnodeError, with_advice, with_remedy
from swarmnode.files import home_folder
from swarmnode.net.tasks import cancel_the_rest, until_first
from swarmnode.terminal.formatting import json_line, printable, wrapped
from swarmnode.terminal.option import option, taking_settings

_FIGURE_SPACE = "\u2007"  # no line breaks there
LEAVE_NOW_S = 10.0  # after the second Ctrl-C
THREADS_S = 0.5  # for threads to end after a command was asked to stop and is over

logger = logging.getLogger(__name__)
_asked_to_stop = threading.Event()
# clear a line that changes, and say whether it comes back; the top one is shown
changing_lines: list[Callable[[bool], None]] = []
_for_json: list[IO[str]] = []  # standard output of the commands under way that print JSON
T = TypeVar("T")

LEVELS = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
    logging.CRITICAL: "critical",
}
"""Names of log levels; hivemind renames logging's own."""


class TextLines(logging.Formatter):
    """Formatter of log lines for people: `2026-11-21 08:15:00,123 W swarmnode.node.node: message`. Further lines of the message and
    its stack trace are indented, so that no text of a stranger looks like another log line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without control characters, because a message may contain a stranger's text."""
        return printable(super().format(record)).replace("\n", "\n    ")


class PlainLines(logging.Formatter):
    """Formatter of log lines for a terminal, where a command speaks in sentences: `Note: message.` for a warning, `Error: message.`
    for an error. A stack trace follows on lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the sentence without control characters, because a message may contain a stranger's text. `say` breaks its
        lines."""
        sentence, _, trace = super().format(record).partition("\n")
        sentence = sentence[:1].upper() + sentence[1:] + ("" if sentence.endswith((".", "!", "?", "…", ":")) else ".")
        mark = "Error: " if record.levelno >= logging.ERROR else "Note: "
        return printable("\n".join([f"{mark}{sentence}", *([trace] if trace else [])]))


class JsonLines(logging.Formatter):
    """Formatter of log lines for log collectors: one JSON object per event, with any stack trace inside it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON line. `time` is UTC in ISO 8601; `trace` is present if the record names a session, `error` if it has an
        exception."""
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": LEVELS.get(record.levelno, str(record.levelno)),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (trace := getattr(record, "trace", None)) is not None:
            line["trace"] = trace
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json_line(line)


LOG_FORMATS = {"text": TextLines(), "json": JsonLines()}


class Interrupted(Exception):
    """Raised after the second Ctrl-C, which asks to leave at once."""


def home_option() -> Any:
    """Define the option --home. Its value is an absolute path, by default the platform's place for user data."""
    return option(
        None,
        "Folder of this machine's identity, caches and known peers.",
        "--home",
        typed=Path,
        parse=lambda home, _flag: home_folder(home),
        factory=home_folder,
        envvar="SWARMNODE_HOME",
    )


HOME = home_option()
JSON = option(False, "Print the result as JSON.", "--json")
EVENTS = option(False, "Print one JSON object per event.", "--json")


@dataclass(frozen=True)
class LogOptions:
    """Options of logging to standard error."""

    log_format: str = option("text", "Format of log lines on standard error.", choices=tuple(LOG_FORMATS))
    verbose: bool = option(False, "Log every step.", "--verbose", "-v")

    def begin(self) -> None:
        """Set up logging: warnings, and with --verbose all messages of swarmnode. On a terminal, warnings are sentences as the rest
        of the output; in a file, and with --verbose, they are log lines."""
        handler = Handler()
        speaks = self.log_format == "text" and not self.verbose and not is_recorded(sys.stderr)
        handler.setFormatter(PlainLines() if speaks else LOG_FORMATS[self.log_format])
        logging.basicConfig(handlers=[handler], level=logging.WARNING)
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about optional kernels
        logging.getLogger("swarmnode").setLevel(logging.DEBUG if self.verbose else logging.WARNING)


Verbosity = Annotated[LogOptions, "verbose"]


def say(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Print text for people on standard output, or on standard error with `err`. Control characters of strangers' texts are
    replaced.

    On a terminal, lines that are too long break between words and keep their indentation. A command in them stays whole, since a
    break would be copied with it.
    """
    make_room(again=nl)
    if nl and not is_recorded(sys.stderr if err else sys.stdout):
        text = fitted(text)
    with outliving_terminal():
        typer.echo(printable(text), nl=nl, err=err)


def make_room(*, again: bool) -> None:
    """Clear the lines that change, before other output. With `again` they come back below it."""
    for clear in list(changing_lines):
        clear(again)


def ask(question: str, **details: Any) -> str:
    """Return the user's answer to a question on standard error; the keywords are those of `typer.prompt`."""
    make_room(again=False)
    return str(typer.prompt(question, err=True, **details))


class Handler(logging.Handler):
    """Log handler that prints on standard error, above lines that change."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record."""
        try:
            say(self.format(record), err=True)
        except Exception:  # as in logging's own handlers: a log line never ends the program
            self.handleError(record)


def fitted(text: str) -> str:
    """Return the text with lines as wide as the terminal, as `say` breaks them."""
    width = shutil.get_terminal_size().columns
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if len(line) > width:
            indent = line[: len(line) - len(line.lstrip())]
            whole = re.sub(r"`[^`]*`|\bswarmnode .*", lambda words: words[0].replace(" ", _FIGURE_SPACE), line.strip())
            lines[number] = wrapped(whole, indent, indent).replace(_FIGURE_SPACE, " ")
    return "\n".join(lines)


def fail(message: str, exit_code: int = 1) -> NoReturn:
    """Print one line on standard error and end the command. Raises typer.Exit with `exit_code`."""
    say(f"error: {' '.join(message.splitlines())}", err=True)
    raise typer.Exit(exit_code)


def stopped(message: str) -> NoReturn:
    """Print a sentence on standard error and end the command with exit code 1: the user stopped it before its end, which is no
    error."""
    say(" ".join(message.splitlines()), err=True)
    raise typer.Exit(1)


def command(function: Callable[..., T]) -> Callable[..., T]:
    """Turn a function into a command. Typer sees the options of its settings; a SwarmnodeError or an error of the system becomes
    one line and an exit code, never a stack trace. With `as_json`, standard output has the command's JSON alone."""
    taking = taking_settings(function)

    @functools.wraps(taking)
    def wrapped(**typed: Any) -> T:
        try:
            with _json_alone() if typed.get("as_json") else contextlib.nullcontext():
                return taking(**typed)
        except SwarmnodeError as error:
            fail(with_remedy(error), error.exit_code)
        except (Interrupted, KeyboardInterrupt):
            say("interrupted", err=True)
            raise typer.Exit(1) from None
        except BrokenPipeError:
            # The reader of our output has gone (`| head`): nothing more can be printed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:
            logger.debug("where this happened:", exc_info=True)
            what = with_advice(error, "") if error.errno in ADVICE else error.strerror or str(error)
            said = what if error.filename is None else f"{error.filename}: {what}"
            fail(said, 2 if error.errno == errno.ENAMETOOLONG else 1)

    return wrapped


def print_json(value: Any) -> None:
    """Print a JSON value on one line of standard output."""
    make_room(again=True)
    with outliving_terminal():
        typer.echo(json_line(value), file=standard_output())


def print_result(value: Any, text: str, *, as_json: bool) -> None:
    """Print what a command has done: `value` as JSON, or `text` for people."""
    print_json(value) if as_json else say(text)


def standard_output() -> IO[str]:
    """Return the stream of the command's results, which is not `sys.stdout` inside a command that prints JSON."""
    return _for_json[-1] if _for_json else sys.stdout


@contextlib.contextmanager
def _json_alone() -> Iterator[None]:
    """Keep standard output for `print_json`: texts for people, and what libraries print, go to standard error."""
    _for_json.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _for_json.pop()


@contextlib.contextmanager
def outliving_terminal() -> Iterator[None]:
    """Ignore the closing of the terminal inside the context, so that a process that was left running (`disown`) goes on; its later
    output is lost."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        _to_nowhere((1, 2))


def run_async(main: Callable[[asyncio.Event], Awaitable[T]]) -> T:
    """Run `main(stop)` on a uvloop and return its result. The first Ctrl-C or SIGTERM sets `stop`; the second one cancels main at
    once.

    SIGHUP, from a terminal that closes, sets `stop` too, unless it was ignored at the start (nohup). Raises Interrupted if main was
    cancelled, or raises it.
    """
    import uvloop

    shown = [number for number in (0, 1, 2) if os.isatty(number)]

    async def supervised() -> T:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(main(stop))

        def on_signal() -> None:
            _asked_to_stop.set()
            if stop.is_set():
                task.cancel()
                # Even if something hangs, the process ends after `LEAVE_NOW_S` seconds; the kernel ends our p2pd with it.
                ending = threading.Timer(LEAVE_NOW_S, os._exit, (1,))
                ending.daemon = True
                ending.start()
            stop.set()

        def on_hangup() -> None:
            """Set `stop`, but never cancel: the kernel and the shell each send a SIGHUP. Later output is lost."""
            _asked_to_stop.set()
            _to_nowhere(shown)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        if heeds_hangup():
            loop.add_signal_handler(signal.SIGHUP, on_hangup)
        try:
            return await task
        except asyncio.CancelledError:
            raise Interrupted from None

    loop = uvloop.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(supervised())
    finally:
        loop.run_until_complete(cancel_the_rest())
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()


def heeds_hangup() -> bool:
    """Return whether SIGHUP has a meaning here: not if it is ignored, as under nohup, nor on Windows."""
    return sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def has_terminal() -> bool:
    """Return whether a terminal controls this process; its closing would send SIGHUP."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def is_recorded(stream: IO[str]) -> bool:
    """Return whether output to `stream` may be stored for others to read: by a journal, in a file, or behind a pipe, as by Docker.
    Only a terminal's is not."""
    try:
        return not stream.isatty()
    except ValueError:  # the stream is closed
        return False


def _to_nowhere(descriptors: Iterable[int]) -> None:
    """Redirect the descriptors to /dev/null: writing to a closed terminal raises an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def leave_threads(exit_code: int) -> None:
    """End the process with `exit_code` if Ctrl-C ended the command but a thread goes on. A thread that imports transformers cannot
    be stopped; Python would wait for it for seconds, and print a stack trace on another Ctrl-C. Files that threads write survive a
    kill, too."""
    threads = [one for one in threading.enumerate() if not one.daemon and one is not threading.current_thread()]
    if not _asked_to_stop.is_set() or not threads:
        return
    until_s = time.monotonic() + THREADS_S
    for one in threads:
        one.join(max(0.0, until_s - time.monotonic()))
    if any(one.is_alive() for one in threads):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # its reader has gone
                stream.flush()
        os._exit(exit_code)


async def unless_stopped(work: Awaitable[T], stop: asyncio.Event) -> T | None:
    """Return the result of `work`; None if the user asked to stop first; `work` is then cancelled."""
    task = asyncio.ensure_future(work)
    await until_first(task, stop.wait())
    return None if task.cancelled() else task.result()


async def joined(joining: Awaitable[T], stop: asyncio.Event) -> T:
    """Return the client that `joining` makes. Raises Interrupted if the user asked to stop first."""
    client = await unless_stopped(joining, stop)
    if client is None:
        raise Interrupted
    return client


STANDARD_INPUT = "-"  # the user's name for it
MAX_LINE_BYTES = 1 << 16


def is_piped() -> bool:
    """Return whether standard input is not a terminal."""
    return not sys.stdin.isatty()


def read_line() -> str:
    """Return the first line without surrounding white space; later lines stay unread. Ends the command if the line is empty."""
    line = _text(sys.stdin.buffer.readline(MAX_LINE_BYTES)).strip()
    return line or fail("standard input was empty: pipe a line into this command", 2)


def read_text(max_bytes: int) -> str:
    """Return all text of standard input, without the line break at its end. Ends the command if there are more than `max_bytes`."""
    data = sys.stdin.buffer.read(max_bytes + 1)
    if len(data) > max_bytes:
        fail(f"standard input has more than {max_bytes >> 20} MiB: send a shorter text", 2)
    return _text(data).rstrip("\r\n")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        fail("standard input is not UTF-8 text: convert it first", 2)


COUNT = "SWARMNODE_RESTARTS"  # environment variable for the restarted command: number of restarts in a row
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
LASTED_S = 600.0  # a run that lasted longer starts a new row
LONGEST_S = 60.0


class CollectorPause:
    """Pause of garbage collection, from construction to `end`, to the end of the context, or until a minute has passed on
    the running loop.

    Imports create no garbage, yet the collector scans everything again and again, which takes a quarter of a start's CPU time.
    Objects that exist at the end stay out of all later collections, which are therefore shorter.
    """

    def __init__(self) -> None:
        self._paused = True
        gc.disable()
        asyncio.get_running_loop().call_later(LONGEST_S, self.end)

    def __enter__(self) -> CollectorPause:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Resume garbage collection. Safe to call twice."""
        if self._paused:
            self._paused = False
            gc.freeze()
            gc.enable()


def pause_s(restarts: int) -> float:
    """Return the seconds to wait before a restart. They double with each restart, so that a broken GPU keeps neither its machine
    nor its neighbours busy."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(restarts, 16)))


@contextlib.contextmanager
def beginning_anew() -> Iterator[None]:
    """Restart the command if the context raises ExecutorDied."""
    began_s = time.monotonic()
    try:
        yield
    except ExecutorDied as error:
        begin_anew(error, time.monotonic() - began_s)


def begin_anew(reason: ExecutorDied, lived_s: float) -> NoReturn:
    """Print the reason, wait (Ctrl-C ends the command), and run the command again in this process."""
    before = os.environ.get(COUNT, "0")
    restarts = int(before) if before.isdecimal() and lived_s < LASTED_S else 0
    say(f"error: {reason}. Starting again in {pause_s(restarts):.0f} s", err=True)
    time.sleep(pause_s(restarts))
    sys.stdout.flush()
    os.environ[COUNT] = str(restarts + 1)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
