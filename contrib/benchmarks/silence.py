"""Longest silences of a command in a terminal: the times without a visible change, and the CPU seconds that its processes used
meanwhile.

    python contrib/benchmarks/silence.py swarmnode fit ./my-checkpoint
    python contrib/benchmarks/silence.py --seconds 60 --type '> =hello' swarmnode chat friends

A service is stopped with Ctrl-C after `--seconds`; its last silence is the one in which it serves.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import signal
import sys
import time
from typing import NamedTuple

import psutil

WIDE, HIGH = "120", "40"
LOOK_S = 0.2
LEAVING_S = 60.0
INVISIBLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Silence(NamedTuple):
    """Time without a visible change; all in seconds."""

    seconds: float
    cpu_s: float
    began_s: float
    after: str  # end of the output before it

    def __str__(self) -> str:
        return f"{self.seconds:5.1f} s, CPU {self.cpu_s:4.1f} s, at {self.began_s:5.1f} s, after {self.after!r}"


def silences(command: list[str], limit_s: float, typed: list[tuple[str, str]]) -> list[Silence]:
    """Run `command` in a terminal for up to `limit_s` seconds and return its silences in their order. Each text in `typed` is typed
    once the text before it has appeared."""
    process, terminal = pty.fork()
    if not process:
        os.environ.update(TERM="xterm-256color", COLUMNS=WIDE, LINES=HIGH)
        os.execvp(command[0], command)
    began_s = last_s = time.monotonic()
    cpu_s, shown, unread, found = _cpu_s(process), "", "", list[Silence]()

    def note() -> None:
        nonlocal last_s, cpu_s
        now_s, used_s = time.monotonic(), _cpu_s(process)
        found.append(Silence(now_s - last_s, max(0.0, used_s - cpu_s), last_s - began_s, shown[-60:].strip()))
        last_s, cpu_s = now_s, used_s

    while time.monotonic() < began_s + limit_s and (piece := _read(terminal)) is not None:
        unread += piece
        visible = INVISIBLE.sub("", piece)
        if visible.strip() and visible != shown:
            note()
            shown = visible
        if typed and typed[0][0] in unread:
            unread = unread.partition(typed[0][0])[2]
            os.write(terminal, f"{typed.pop(0)[1]}\n".encode())
    note()
    os.kill(process, signal.SIGINT)
    until_s = time.monotonic() + LEAVING_S
    while time.monotonic() < until_s and _read(terminal) is not None:
        pass
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return found


def _read(terminal: int) -> str | None:
    """Return the new output, which may be empty; None once the command has ended."""
    if not select.select([terminal], [], [], LOOK_S)[0]:
        return ""
    try:
        return os.read(terminal, 1 << 16).decode(errors="replace") or None
    except OSError:  # Linux, once the other end is closed
        return None


def _cpu_s(process: int) -> float:
    """Return the CPU seconds of a process and its living children; 0 once it has ended."""
    try:
        root = psutil.Process(process)
        return sum(sum(one.cpu_times()[:2]) for one in (root, *root.children(recursive=True)))
    except psutil.Error:
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="stop the command after these (%(default)s)")
    parser.add_argument("--type", action="append", default=[], metavar="SEEN=TEXT", help="type TEXT once SEEN appears")
    parser.add_argument("--most", type=int, default=5, help="silences to print (%(default)s)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    typed = [(seen, text) for seen, _, text in (each.partition("=") for each in asked.type)]
    found = silences(asked.command, asked.seconds, typed)
    sys.stdout.write(f"{' '.join(asked.command)}: first output after {found[0].seconds:.1f} s\n")
    for silence in sorted(found, reverse=True)[: asked.most]:
        sys.stdout.write(f"  {silence}\n")


if __name__ == "__main__":
    main()
