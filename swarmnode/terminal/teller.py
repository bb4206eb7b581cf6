"""Output of a service while it runs: a line or a JSON object per event. On a terminal, passing events share one line that
changes."""

from __future__ import annotations

import shutil
import sys
from types import TracebackType
from typing import Any

from swarmnode.terminal.console import outliving_terminal, print_json, say
from swarmnode.terminal.formatting import one_line

# Events whose text the next one replaces on a terminal.
PASSING = frozenset(("waiting", "machine", "loading", "fetching", "moving", "compressing"))
# Events after which a node is settled for a while: what its owner needs to read stands last then.
SETTLED = frozenset(("ready", "spare", "paused"))
CLEAR_LINE = "\x1b[2K"


class Teller:
    """Printer of a service's events, called with (event, text for people, **details for scripts). As a context manager, it clears
    the changing line at the end."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._changing = not as_json and sys.stdout.isatty()
        self._line = ""
        self._is_settled = False
        self._held: list[str] = []

    def __repr__(self) -> str:
        return f"<Teller of {'JSON' if self._as_json else 'text'}, {self._line!r}>"

    def __enter__(self) -> Teller:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._show("")

    def __call__(self, event: str, text: str, **details: Any) -> None:
        if self._as_json:
            print_json({"event": event, **details})
        elif self._changing and event in PASSING:
            self._show(one_line(text))
        else:
            line = self._line
            self._show("")
            say(text)
            if event in SETTLED:
                self._is_settled = True
                while self._held:
                    say(self._held.pop(0))
            self._show(line if event not in ("ready", "draining", "left") else "")

    def last(self, event: str, text: str, **details: Any) -> None:
        """Tell an event after the first one of SETTLED, so that its text stands last; to scripts at once."""
        if self._as_json or self._is_settled:
            self(event, text, **details)
        else:
            self._held.append(text)

    def _show(self, line: str) -> None:
        """Draw the changing line. The cursor stays at its beginning, so that any other output overwrites it."""
        if self._changing and (line or self._line):
            with outliving_terminal():
                sys.stdout.write(f"{CLEAR_LINE}{line[: shutil.get_terminal_size().columns - 1]}\r")
                sys.stdout.flush()
        self._line = line
