"""Output of a service while it runs: a line or a JSON object per event. Passing events share one line of a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from swarmnode.terminal.console import make_room, print_json, say
from swarmnode.terminal.formatting import one_line
from swarmnode.terminal.progress import ChangingLine

# Events whose text the next one replaces on a terminal.
PASSING = frozenset(("reading", "opening", "waiting", "machine", "loading", "fetching", "moving", "compressing"))
LAST = frozenset(("ready", "draining", "left"))  # events that end the changing line
# Events after which a node is settled for a while: what its owner needs to read stands last then.
SETTLED = frozenset(("ready", "spare", "paused"))


class Teller:
    """Printer of a service's events, called with (event, text for people, **details for scripts). As a context manager, it clears
    the changing line at the end."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._line = ChangingLine(sys.stdout) if not as_json and sys.stdout.isatty() else None
        self._is_settled = False
        self._held: list[str] = []

    def __enter__(self) -> Teller:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.close()

    def __call__(self, event: str, text: str, **details: Any) -> None:
        if self._as_json:
            print_json({"event": event, **details})
        elif self._line is not None and event in PASSING:
            make_room(again=True)
            self._line.show(one_line(text))
        else:
            if self._line is not None and event in LAST:
                self._line.show("")
            say(text)
            if event in SETTLED:
                self._is_settled = True
                while self._held:
                    say(self._held.pop(0))

    def last(self, event: str, text: str, **details: Any) -> None:
        """Tell an event after the first one of SETTLED, so that its text stands last; to scripts at once."""
        if self._as_json or self._is_settled:
            self(event, text, **details)
        else:
            self._held.append(text)
