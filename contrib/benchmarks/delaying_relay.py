"""TCP relays on loopback that hand bytes on late, as in `with DelayingRelay(0.025, 1e8) as relay: port = relay.to(4001)`.

A node that announces the relay's port instead of its own is reached over it. Every connection then has `delay_s` each way, and at
most `rate_bps` bits per second (0: no limit). The relays run in one process of their own. Direct streams would bypass them: run
nodes with `--no-direct`.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from types import TracebackType

CHUNK_BYTES = 1 << 16
AHEAD_S = 0.005  # of bytes that may wait in the relay for their turn


def free_port() -> int:
    """Return a TCP port of loopback that is free at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class DelayingRelay:
    """Process with a relay to each port that `to` was called for. Leaving its `with` block ends it."""

    def __init__(self, delay_s: float, rate_bps: float = 0.0) -> None:
        self.delay_s = delay_s
        self.rate_bps = rate_bps
        self._process: subprocess.Popen[str] | None = None

    def __repr__(self) -> str:
        return f"<DelayingRelay by {1e3 * self.delay_s:g} ms>"

    def __enter__(self) -> DelayingRelay:
        arguments = [sys.executable, __file__, str(self.delay_s), str(self.rate_bps)]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def to(self, port: int) -> int:
        """Return the port of a new relay to `port`, which need not be open yet."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{port}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()  # which ends it
        self._process.wait()


async def hand_over(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float, rate_bps: float
) -> None:
    """Copy bytes from `reader` to `writer` at `rate_bps`, each `delay_s` seconds later, until the connection ends."""
    loop = asyncio.get_running_loop()
    free_s = 0.0  # when the line has let everything through

    def write(data: bytes) -> None:
        if not writer.is_closing():
            writer.write(data)

    try:
        while data := await reader.read(CHUNK_BYTES):
            if rate_bps:
                free_s = max(free_s, loop.time()) + 8 * len(data) / rate_bps
                loop.call_at(free_s + delay_s, write, data)
                await asyncio.sleep(free_s - loop.time() - AHEAD_S)
            elif delay_s:
                loop.call_later(delay_s, write, data)
            else:
                write(data)
    except ConnectionError:
        pass
    loop.call_at(max(free_s, loop.time()) + delay_s, writer.close)


async def relay(delay_s: float, rate_bps: float) -> None:
    """Open a relay to each port that a line of the standard input names, until it ends."""
    loop = asyncio.get_running_loop()
    working: set[asyncio.Task[None]] = set()

    def accept(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = loop.create_task(connect(port, reader, writer))
        working.add(task)
        task.add_done_callback(working.discard)

    async def connect(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        for one in (writer, back):
            one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(hand_over(reader, back, delay_s, rate_bps), hand_over(there, writer, delay_s, rate_bps))

    servers = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        port = int(line)
        servers.append(await asyncio.start_server(lambda r, w, port=port: accept(port, r, w), "127.0.0.1", 0))
        print(servers[-1].sockets[0].getsockname()[1], flush=True)


if __name__ == "__main__":
    asyncio.run(relay(*map(float, sys.argv[1:])))
