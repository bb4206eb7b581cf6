"""What strangers wrote is text to a terminal, and nothing else."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from swarmnode.cli.use.status import status_table
from swarmnode.metrics import table
from swarmnode.metrics.exposition import Sources, exposed
from swarmnode.metrics.metric import Reading
from swarmnode.terminal import progress
from swarmnode.terminal.console import (
    Handler,
    JsonLines,
    LogOptions,
    TextLines,
    changing_lines,
    fail,
    print_json,
    say,
)
from swarmnode.terminal.formatting import json_line, one_line, printable, wrapped
from swarmnode.terminal.progress import Teller, bytes_bar, share_bar, spinner
from swarmnode.terminal.tables import new_table, show
from swarmnode.terminal.training_view import curve_with_notes

ESCAPES = ["\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "\x08\x08", "\r", "\x00", "\x7f", "\u202e", "\u2066", "\u2028"]


def commands(text: str) -> list[str]:
    """The characters that a terminal could obey."""
    return [
        one for one in text if one != "\n" and (ord(one) < 32 or 127 <= ord(one) < 160 or one in "\u202e\u2066\u2028")
    ]


@pytest.mark.parametrize("escape", ESCAPES)
def test_nothing_that_commands_a_terminal_is_printed(escape: str, capsys: pytest.CaptureFixture[str]) -> None:
    say(f"before{escape}after")
    assert not commands(capsys.readouterr().out)
    print_json({"name": escape})
    printed = capsys.readouterr().out
    assert not commands(printed)
    assert json.loads(printed) == {"name": escape}


def test_text_stays_text() -> None:
    text = "Zeile 1\n\tÜmläut 汉字 \u0645\u200c\u06cc 👩\u200d🔬\n"
    assert printable(text) == text
    assert json.loads(json_line({"text": text})) == {"text": text}
    assert one_line("a\n\nb\tc") == "a b c"


@pytest.mark.parametrize("lines", [TextLines(), JsonLines()], ids=["text", "json"])
def test_log_lines_command_nothing(lines: logging.Formatter) -> None:
    record = logging.LogRecord("swarmnode", logging.WARNING, "", 0, "peer %s", ("\x1b[2J\x9b",), None)
    assert not commands(lines.format(record))


@pytest.mark.parametrize("name", ["\x1b[2Jx", "[/]", "[red]x", "[link=file:///]x[/link]", "two\nlines"])
def test_a_name_is_no_markup_and_no_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    peer = {
        "peer": "Q",
        "name": name,
        "state": "ready",
        "device": name,
        "span": [0, 2],
        "sessions": 0,
        "reached": "unknown",
        "sends": {},
    }
    status = {"name": name, "units": 2, "mode": "serve", "adapters": [], "missing": [], "ungiven": [], "peers": [peer]}
    show(status_table(status))
    printed = capsys.readouterr().out
    assert not commands(printed)
    assert one_line(name)[:3] in printed


def test_a_peer_is_one_line_of_80_columns() -> None:
    peer = {
        "peer": "12D3KooWAbcdefgh",
        "name": "a-very-long-name-of-a-node-in-the-cellar",
        "state": "draining",
        "device": "NVIDIA GeForce RTX 3090",
        "span": [70, 126],
        "sessions": 12,
        "reached": "relayed",
        "sends": {},
    }
    status = {"name": "friends", "units": 126, "mode": "serve", "adapters": [], "missing": [3, 4], "peers": [peer] * 3}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(status_table({**status, "ungiven": [], "max_model_len": 131072}))
    title, *_, first, second, third = [line.rstrip() for line in console.export_text().splitlines() if line.strip()]
    assert title.strip() == "friends: texts of up to 131,072 tokens, 126 layers, no machine holds 3-4"
    assert first == second == third and "relayed" in first and "RTX 3090" in first and "█" in first
    console.print(status_table({**status, "ungiven": [3, 4]}))
    said = " ".join(console.export_text().split())
    assert "no machine gives the weights of layers 3-4 to new machines" in said and "moved or changed" in said


def test_what_passes_shares_a_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", terminal)
    with Teller(as_json=False) as tell:
        tell("fetching", "10 %\x1b[2J")
        tell("fetching", "20 %")
        tell("ready", "Serving")
        tell("left", "Left")
    assert terminal.getvalue().count("\n") == 2 and "\x1b[2J" not in terminal.getvalue()
    assert terminal.getvalue().endswith("Left\n")
    assert "20 %" not in terminal.getvalue().partition("Serving")[2], "it is over"


def a_terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is written from now on to standard output and standard error, which are one terminal."""
    written = io.StringIO()
    written.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", written)
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setattr(progress, "TICK_S", 3600.0)  # a test draws by itself
    return written


def screen(written: str) -> list[str]:
    """The lines that a terminal shows after all of this output."""
    lines = [""]
    for part in re.split(r"(\r|\n|\x1b\[2K)", written):
        if part == "\n":
            lines.append("")
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif part and part != "\r":
            lines[-1] = part + lines[-1][len(part) :]
    return lines


def test_what_a_command_does_stands_below_its_other_output(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    line = progress.ChangingLine(terminal)
    line.show("Joining friends …")
    assert screen(terminal.getvalue()) == ["Joining friends …"]
    say("No machine holds layers 3-4 yet", err=True)
    assert screen(terminal.getvalue()) == ["No machine holds layers 3-4 yet", ""]
    line.show(line.text)  # as a tick does
    assert screen(terminal.getvalue())[-1] == "Joining friends …"
    logging.getLogger(progress.STAGES).info("Converting a vocabulary of 262,144 tokens")
    assert screen(terminal.getvalue())[-1] == "Converting a vocabulary of 262,144 tokens …"
    line._since_s -= 75.2
    line.show(line.text)
    assert screen(terminal.getvalue())[-1].endswith("… 75 s")
    say("Once", nl=False)  # a text that goes on in its line
    line.show(line.text)
    assert screen(terminal.getvalue()) == ["No machine holds layers 3-4 yet", "Once"]
    line.close()


def test_the_start_of_a_command_is_told_until_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    with progress.spinner("Starting", until_output=True) as start, progress.spinner("Reading") as reading:
        assert start._line is not None and reading._line is not None
        assert changing_lines[-1] == reading._line._clear, "the inner one is shown"
        print_json({"event": "ready"})
        assert (start._line.text, reading._line.text) == ("", "Reading …")
        with progress.covering_lines():
            assert changing_lines[-1] != reading._line._clear, "a bar has the terminal for itself"
    assert not changing_lines and screen(terminal.getvalue()) == ['{"event": "ready"}', ""]


def test_a_log_line_stands_above_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    with progress.spinner("Reading") as reading:
        assert reading._line is not None
        reading._line.show("Reading …")
        Handler().handle(logging.makeLogRecord({"msg": "a peer has gone"}))
        reading._line.show("Reading …")
        assert screen(terminal.getvalue()) == ["a peer has gone", "Reading …"]


def test_a_pipe_gets_no_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    with progress.spinner("Joining friends") as joining, progress.bytes_bar("Reading", quiet=False) as bar:
        joining.now("Loading")
        assert bar is None and not changing_lines
    assert not pipe.getvalue()


@pytest.mark.parametrize("settles", ["ready", "spare", "paused"])
def test_what_is_needed_last_stands_last(settles: str, capsys: pytest.CaptureFixture[str]) -> None:
    tell = Teller(as_json=False)
    tell.last("serving", "the page")
    tell("machine", "a machine")
    assert "page" not in capsys.readouterr().out
    tell(settles, "settled")
    tell("news", "later")
    assert capsys.readouterr().out == "settled\nthe page\nlater\n"
    tell.last("serving", "at once")
    script = Teller(as_json=True)
    script.last("serving", "text", url="u")
    assert capsys.readouterr().out == 'at once\n{"event": "serving", "url": "u"}\n'


def test_lines_of_a_terminal_break_between_words_and_an_invite_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    invite = "swarm2" + "x" * 200
    Teller(as_json=False)("welcome", f"{'word ' * 30}\n  {'deeper ' * 20}\n{invite}")
    lines = terminal.getvalue().splitlines()
    assert lines[-1] == invite and all(len(line) <= 60 for line in lines[:-1])
    assert any(line.startswith("  deeper") for line in lines)


@pytest.mark.parametrize("place", range(0, 70, 3))
@pytest.mark.parametrize("written", ["`swarmnode stop my friends`", "swarmnode run my friends --memory 6GB"])
def test_a_command_in_a_sentence_is_not_broken(place: int, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    say(f"{'w ' * place}then {written}")
    assert written in terminal.getvalue()


@pytest.mark.parametrize(
    ("is_terminal", "options", "begins"),
    [
        (True, {}, "Note: The door is at another port."),
        (True, {"verbose": True}, "20"),
        (True, {"log_format": "json"}, "{"),
        (False, {}, "20"),
    ],
)
def test_a_warning_is_a_sentence_in_a_terminal_and_a_log_line_in_a_file(
    is_terminal: bool, options: dict[str, Any], begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", stream)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        LogOptions(**options).begin()
        logging.getLogger("swarmnode.node.bootstrap").warning("the door is at %s", "another port")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.getLogger("swarmnode").setLevel(logging.NOTSET)
    assert stream.getvalue().startswith(begins) and "port" in stream.getvalue()


def test_sentences_are_wrapped_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what could control it replaced; a path stays whole."""
    monkeypatch.setenv("COLUMNS", "60")
    path = "/a-folder" * 9
    lines = wrapped(f"{'word ' * 30}\x1b[31m {path} end", "ok   ", "     ").splitlines()
    assert lines[0].startswith("ok   word") and all(line.startswith("     ") for line in lines[1:])
    assert all(len(line) <= 60 for line in lines if path not in line) and any(line.strip() == path for line in lines)
    assert "\x1b" not in "".join(lines)


MARKUP = [
    "[/]",
    "[/x]",
    "[bold]",
    "[link=file:///]",
    "[@click=app.bell]",
    "[[",
    "]",
    "\\[",
    "{task.total}",
    "{0}",
    "%s",
    "%(name)s",
]
BREAKS = ["\n", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"]
FORGED = "2026-11-21 08:15:00,123 E swarmnode.node: all is lost"
NAMES = [
    f"{before}{hostile}{after}"
    for hostile in (*ESCAPES, *MARKUP, *(f"{one}{FORGED}" for one in BREAKS))
    for before, after in (("", ""), ("a ", " b"), ("x", hostile))
]


class Screen(io.StringIO):
    """Terminal as programs see it."""

    def isatty(self) -> bool:
        return True


def table_of(name: str) -> None:
    show(new_table(name, [name, "x"], caption=name))


def status_of(name: str) -> None:
    peer = {
        "peer": name,
        "name": name,
        "state": name,
        "device": name,
        "span": [0, 2],
        "sessions": 0,
        "reached": "unknown",
    }
    peer |= {"sends": {name: name}, "draft_model": name}
    status = {"name": name, "units": 2, "mode": "serve", "adapters": [name], "missing": [], "peers": [peer]}
    show(status_table(status))


def waits_for(name: str) -> None:
    with spinner(name, quiet=False), bytes_bar(name, quiet=False) as bar:
        assert bar is not None
    with share_bar(name, quiet=False) as tell:
        tell(0.5, name)


def tells_of(name: str) -> None:
    with Teller(as_json=False) as tell:
        tell("waiting", name)
        tell("ready", name)


def draws(name: str) -> None:
    Console().print(curve_with_notes([(0, 1.0)], 2, 80, (name, "bold")))


def answers(name: str) -> None:
    say(name)
    say(name, err=True)
    print_json({name: [name]})
    with pytest.raises(typer.Exit):
        fail(name)


OUTPUTS = [table_of, status_of, tells_of, draws, answers]


@pytest.mark.parametrize("output", OUTPUTS)
def test_whatever_a_name_is_it_is_shown_and_does_nothing(
    output: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    output("a plain name")
    plain = without_style("".join(capsys.readouterr()))
    for name in NAMES:
        output(name)
        printed = without_style("".join(capsys.readouterr()))
        assert set(commands(printed)) <= set(commands(plain)), name
    for name in MARKUP:
        output(name)
        printed = without_style("".join(capsys.readouterr()))
        assert name in printed or json.dumps(name)[1:-1] in printed, name


def without_style(text: str) -> str:
    """The text without the colours and moves of the cursor that rich makes of its own accord."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("output", [waits_for, draws])
def test_on_a_terminal_too(output: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    for name in NAMES:
        output(name)
        assert not set(without_style(screen.getvalue())) & set("\x07\x1b\x9b\x08\x00\x7f\u202e\u2066"), name
        screen.seek(0)
        screen.truncate()


@pytest.mark.parametrize("lines", [TextLines(), JsonLines()], ids=["text", "json"])
def test_no_message_and_no_trace_looks_like_another_log_line(lines: logging.Formatter) -> None:
    for name in NAMES:
        try:
            raise ValueError(name)
        except ValueError:
            record = logging.LogRecord("swarmnode", logging.WARNING, "", 0, "peer %s", (name,), sys.exc_info())
        printed = lines.format(record)
        assert not commands(printed)
        assert not any(line.startswith(FORGED[:10]) for line in printed.splitlines()[1:]), name
        assert isinstance(lines, TextLines) or len(printed.splitlines()) == 1


async def test_labels_of_metrics_are_what_they_were() -> None:
    for name in NAMES:
        readings = [Reading(table.DHT_FAILURES, 1.0, (name,))]
        text = (await exposed([Sources(name, lambda readings=readings: readings)])).decode()
        (found,) = [
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == table.DHT_FAILURES.name
        ]
        assert found.labels == dict(zip(("swarm", *table.DHT_FAILURES.labels), (name, name), strict=True))
