"""A local process keeps a node's control socket busy: lines without end, deep nesting, answers that it never reads."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from attack import Outcome, main

from swarmnode.lending.control import ControlServer, tell_node
from swarmnode.lending.lending import Lending

VIRTUAL, FAST = False, False
HELD = 100
SAID = (
    b"",
    b'{"command": "sta',
    b"[" * 1000 + b"\n",
    b"x" * (1 << 20),
    b'{"command": "state", "wait_s": 1e308}\n',
    b'{"command": "stop", "command": "state"}\n',
    '{"command": "\u202e\u0000pause"}\n'.encode(),
    b'{"command": "pause", "keep": "everything"}\n',
    b"\xff\xfe\n",
)
ANSWER_S = 2.0


async def attack() -> Outcome:
    lending, stop = Lending(), asyncio.Event()
    before = lending.state
    with tempfile.TemporaryDirectory() as home:
        server = ControlServer(lending, stop, lambda: {"swarm": "friends"})
        async with server.listening(Path(home), "node") as path:
            assert path is not None
            others_may = any(place.stat().st_mode & 0o077 for place in (path, path.parent))
            held = []
            for number in range(HELD):
                _, writer = await asyncio.open_unix_connection(path)
                writer.write(SAID[number % len(SAID)])
                held.append(writer)
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            answer = await asyncio.wait_for(asyncio.to_thread(tell_node, path, "state"), ANSWER_S)
            waited_s = loop.time() - began_s
            for writer in held:
                writer.close()
            await asyncio.sleep(0.1)  # for the server to see that they are gone
    return Outcome(
        not others_may and answer is not None and lending.state is before and not stop.is_set(),
        f"{HELD} held it; its owner was answered after {waited_s:.2f} s, and the node is as it was; "
        f"other users {'may' if others_may else 'may not'} open it",
    )


main(__name__, attack, virtual=VIRTUAL)
