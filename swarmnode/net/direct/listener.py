"""Where direct connections come in: a TCP port on which only those who show a token that is expected get further.

Everybody else costs one of few places, for seconds, and 16 bytes. When all places are taken, the oldest of the address group with
most goes: an honest peer needs its place for one round trip.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from swarmnode.net.direct.prologue import Prologue
from swarmnode.net.limits.address_group import address_group

log = logging.getLogger(__name__)

MOST_NOT_SHOWN = 128  # connections that have not shown a token yet
SHOW_TIMEOUT_S = 2.0


class DirectListener:
    """One port, on all addresses at which p2pd listens, too. Nobody need listen: then `port` is 0."""

    def __init__(self) -> None:
        self.port = 0
        self._servers: list[asyncio.AbstractServer] = []
        self._expected: dict[bytes, Callable[[Prologue], None]] = {}
        self._groups: dict[Prologue, str] = {}  # of those that have not shown anything, in the order in which they came
        self._timers: dict[Prologue, asyncio.TimerHandle] = {}

    def __repr__(self) -> str:
        return f"<DirectListener on port {self.port}, {len(self._expected)} expected, {len(self._groups)} not shown>"

    async def open(self, hosts: Sequence[str]) -> None:
        """Listen on each IP address; one on which that cannot be is left out."""
        loop = asyncio.get_running_loop()
        for host in hosts:
            try:
                server = await loop.create_server(lambda: Prologue(self._came, self._settled), host, self.port)
            except OSError as error:
                log.warning("no direct connections at %s: %s", host, error.strerror or error)
                continue
            self._servers.append(server)
            self.port = server.sockets[0].getsockname()[1]

    def expect(self, token: bytes, on_shown: Callable[[Prologue], None]) -> None:
        """`on_shown` takes over the connection that shows this token, once; until `forget`."""
        self._expected[token] = on_shown

    def forget(self, token: bytes) -> None:
        """Nobody is expected with it any more. Safe to call twice."""
        self._expected.pop(token, None)

    def _came(self, prologue: Prologue) -> None:
        if len(self._groups) == MOST_NOT_SHOWN:
            ((group, _),) = Counter(self._groups.values()).most_common(1)
            self._leave(oldest := next(each for each, of in self._groups.items() if of == group))
            oldest.abort()
        self._groups[prologue] = address_group(f"/ip{6 if ':' in prologue.host else 4}/{prologue.host}")
        self._timers[prologue] = asyncio.get_running_loop().call_later(SHOW_TIMEOUT_S, prologue.abort)

    def _leave(self, prologue: Prologue) -> None:
        if self._groups.pop(prologue, None) is not None:
            self._timers.pop(prologue).cancel()

    def _settled(self, prologue: Prologue) -> None:
        self._leave(prologue)
        token = prologue.shown
        on_shown = None if token is None else self._expected.pop(token, None)
        if on_shown is None:
            prologue.abort()
        else:
            on_shown(prologue)

    def close(self) -> None:
        """Listen no longer, and end what has not shown anything. Safe to call twice."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        self.port = 0
        for prologue in list(self._groups):
            self._leave(prologue)
            prologue.abort()
