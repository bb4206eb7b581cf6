"""Two friends, from nothing to a chat in the second one's browser; prints every line that they typed and read, then JSON.

    python contrib/benchmarks/two_friends.py SmolLM2-135M-Instruct.Q4_1.gguf

Alice hosts the model. Bob joins by her invite, serves himself a page, and chats in Chromium. Each has a home folder, a terminal
with a shell, and a network namespace; a cable joins the two. `first_token_s` is the time from Alice's Enter to the first
token that a tool gets from her API, `chat_s` from Bob's first Enter to the first words in his browser. The floor of
`first_token_s` is 20 s on a quiet machine; the exit code is 1 beyond it. Needs root, iproute2, util-linux and bash; without
them the script says so and ends with code 0. Without Chromium, Bob's chat is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # networks of namespaces and the browser belong to the tests

from tests.browser.chromium import Chromium, find_chromium
from tests.real.network_lab import NetworkLab, program

ROOT = Path(__file__).parents[2]
FLOOR_S = 20.0
PATIENCE_S = 300.0
ADDRESSES = {"alice": "192.168.44.1", "bob": "192.168.44.2"}
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]")
PROMPT = "What is the capital of France?"
LAST = "document.querySelector('.message.assistant:last-child .text')?.textContent"
DONE = "document.querySelector('.message.assistant:last-child footer')?.textContent"
TOOL = """
import json, sys, urllib.request
body = {"model": sys.argv[2], "messages": [{"role": "user", "content": sys.argv[3]}], "stream": True, "max_tokens": 16, "seed": 0}
request = urllib.request.Request(sys.argv[1] + "/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
for line in urllib.request.urlopen(request):
    if line.startswith(b"data: {") and (text := json.loads(line[6:])["choices"][0]["delta"].get("content")):
        print(text, flush=True)
        break
"""


class Cable(NetworkLab):
    """Two places with one cable between them."""

    def _build(self) -> None:
        for place in ADDRESSES:
            self._hold(place)
        self._ip("alice", f"link add eth0 type veth peer name eth0 netns {self.holders['bob']}")
        for place, address in ADDRESSES.items():
            self._ip(place, f"addr add {address}/24 dev eth0")
            self._ip(place, "link set eth0 up")


class Terminal:
    """A friend's terminal with a shell; what it shows is printed line by line, with the friend's name before it."""

    def __init__(self, name: str, folder: Path, inside: Sequence[str]) -> None:
        self.name = name
        self.folder = folder
        self._text = ""
        self._printed = 0
        folder.mkdir()
        pid, self._end = pty.fork()
        if pid == 0:
            os.chdir(folder)
            shell = [*inside, "bash", "--norc", "--noprofile", "-i"]
            os.execvpe(shell[0], shell, _environment(name, folder))
        self._pid = pid
        self.read_until(rf"{name}\$ $")

    def __repr__(self) -> str:
        return f"<Terminal of {self.name}>"

    def type(self, line: str) -> float:
        """Type a line and Enter; return the time."""
        self._text, self._printed = "", 0
        os.write(self._end, f"{line}\n".encode())
        return time.monotonic()

    def read_until(self, pattern: str) -> re.Match[str]:
        """Read what the terminal shows since the last typed line, until it matches. Raises TimeoutError with the text."""
        until_s = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self._text)) is None:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{self.name} never read {pattern!r}: {self._text[-2000:]}")
            if select.select([self._end], [], [], 0.1)[0]:
                self._text += CONTROL.sub("", os.read(self._end, 1 << 16).decode(errors="replace")).replace(
                    "\r\n", "\n"
                )
                self._print()
        return found

    def interrupt(self) -> None:
        """Press Ctrl-C and read until the shell is back."""
        os.write(self._end, b"\x03")
        self.read_until(rf"{self.name}\$ $")

    def close(self) -> None:
        """Close the terminal."""
        self._print(rest=True)
        os.close(self._end)
        with contextlib.suppress(ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def _print(self, *, rest: bool = False) -> None:
        """Print the whole lines that are new, each as it stood last."""
        end = len(self._text) if rest else self._text.rfind("\n") + 1
        for line in self._text[self._printed : end].rstrip("\n").split("\n") if end > self._printed else ():
            shown = line.rstrip("\r").rpartition("\r")[2]  # a line that changed, as it stood last
            print(f"{self.name:>5} | {shown}", flush=True)
        self._printed = max(end, self._printed)


def _environment(name: str, folder: Path) -> dict[str, str]:
    """Return the environment of a friend: a home of its own, and the command `swarmnode` of this checkout."""
    commands = folder / "bin"
    commands.mkdir()
    command = commands / "swarmnode"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m swarmnode.cli.main "$@"\n')
    command.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARMNODE_")}
    ours = {"SWARMNODE_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), "PS1": f"{name}$ ", "COLUMNS": "200"}
    return {**kept, **ours, "PATH": f"{commands}:{os.environ['PATH']}", "HISTFILE": "/dev/null"}


@contextlib.contextmanager
def terminals(folder: Path, lab: Cable) -> Iterator[tuple[Terminal, Terminal]]:
    """Open the two friends' terminals; close them at the end of the context."""
    opened: list[Terminal] = []
    try:
        opened.extend(Terminal(name, folder / name, lab.inside(name)) for name in ADDRESSES)
        yield opened[0], opened[1]
    finally:
        for terminal in opened:
            terminal.close()


def first_token(inside: Sequence[str], url: str, model: str) -> str:
    """Return the first words that a tool gets from the API. Raises CalledProcessError."""
    asked = [*inside, sys.executable, "-c", TOOL, url, model, PROMPT]
    return subprocess.run(asked, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout.strip()


def chat(page_url: str, inside: Sequence[str], folder: Path) -> tuple[str, float]:
    """Chat in a browser of that network; return the answer, and when its first words came. Raises RuntimeError."""
    browser = folder / "browser"
    browser.write_text(f'#!/bin/sh\nexec {shlex.join([*inside, find_chromium() or "chromium"])} "$@"\n')
    browser.chmod(0o755)
    with Chromium(str(browser), folder / "profile") as chromium:
        page = chromium.open(page_url)
        page.wait_until("document.getElementById('model').value")
        page.evaluate("document.getElementById('max-tokens').value = 24")
        page.type_and_enter("#prompt", PROMPT)
        page.wait_until(LAST)
        answered_s = time.monotonic()
        return str(page.wait_until(f"{DONE} && {LAST}")), answered_s


def walk(model: Path, folder: Path) -> dict[str, object]:
    """Walk both friends from nothing to a chat; return the figures. Raises TimeoutError."""
    with Cable() as lab, terminals(folder, lab) as (alice, bob):
        begun_s = alice.type(f"swarmnode host {shlex.quote(str(model))}")
        reading_s = _since(begun_s, alice.read_until(r"Reading .*\n"))
        url = alice.read_until(r"For tools: +(\S+) +\(model (\S+)\)")
        words = first_token(lab.inside("alice"), url[1], url[2])
        measured: dict[str, object] = {"reading_s": reading_s, "first_token_s": _since(begun_s), "first_token": words}
        invite = alice.read_until(r"\nswarmnode join\n(swarm2\w+)\n")[1]

        joining_s = bob.type("swarmnode join")
        bob.read_until(r"Invite: $")
        bob.type(invite)
        bob.read_until(r"Your name, as others see it \[.*\]: $")
        bob.type("Bob")
        name = bob.read_until(r"Joined ([^:\s]+):")[1]
        bob.read_until(r"bob\$ $")
        bob.type(f"swarmnode serve {name}")
        page = bob.read_until(r"Web page: +(\S+)\n")[1]
        if find_chromium() is None:
            measured["chat"] = "left out: there is no Chromium here (apt-get install chromium)"
        else:
            answer, answered_s = chat(page, lab.inside("bob"), folder)
            print(f"  bob | [in the browser] {PROMPT}\n  bob | [in the browser] {answer}", flush=True)
            measured |= {"chat": answer, "chat_s": round(answered_s - joining_s, 1)}
        bob.interrupt()
        alice.interrupt()
        return measured


def _since(begun_s: float, _read: object = None) -> float:
    return round(time.monotonic() - begun_s, 1)


def lacking() -> str | None:
    """Return why the friends cannot be walked here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "unshare", "nsenter", "bash") if program(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: apt install iproute2 util-linux bash)"
    try:
        with Cable():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"networks cannot be built here: {getattr(error, 'stderr', error)}"


def main() -> int:
    """Walk the friends and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="GGUF file or folder of a model that chats")
    model = parser.parse_args().model.absolute()
    if (reason := lacking()) is not None:
        print(json.dumps({"skipped": reason}))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        measured = walk(model, Path(folder))
    load, cores = os.getloadavg()[0], os.cpu_count()
    print(json.dumps({**measured, "floor_s": FLOOR_S, "load_average": round(load, 1), "cores": cores}))
    return int(float(str(measured["first_token_s"])) > FLOOR_S)


if __name__ == "__main__":
    sys.exit(main())
