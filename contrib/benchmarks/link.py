"""Cost of a Link over the bare p2pd stream below it, between two processes, in one run. Prints JSON.

    python contrib/benchmarks/link.py [--mib 256] [--round-trips 2000] [--runs 5]

Throughput: frames with 1 MiB of payload, codec none, against a bare p2pd binary stream (hivemind's own, asyncio readers and
writers) written in pieces of the same size. Latency: a 2 KiB frame there and a token frame back, against the same sizes on
the bare stream and on plain TCP. The subjects take turns; all figures are medians over the runs, ratios within a run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import uvloop

from swarmnode.codec.body import VERSION, Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Chunk, Hello, Output, Ready
from swarmnode.links.link import Link
from swarmnode.links.link_config import LinkConfig
from swarmnode.net.identity import Identity
from swarmnode.net.interfaces import Stream
from swarmnode.net.libp2p.engine import Engine, EngineConfig
from swarmnode.net.libp2p.from_hivemind import PeerID

PROTOCOL = "/swarmnode/benchmark/1"
BARE_STREAM = "bare"
PIECE_BYTES = 1 << 20
SMALL_BYTES = 2048
REPLY_BYTES = 24  # a token frame: 16 bytes of header, about 8 of body
BULK, PINGPONG = b"b", b"p"
HELLO = Hello(VERSION, bytes(32), "benchmark")


async def start_engine(folder: str) -> Engine:
    path = Path(folder) / "peer.key"
    Identity.load_or_create(path)
    return await Engine.start(EngineConfig(path))


class Server:
    """Server process: swallows bulk and answers its end, answers every small message."""

    async def over_link(self, stream: Stream) -> None:
        link = await Link.accept(stream, HELLO, config=LinkConfig())

        def on_frame(frame: Frame, body: Body) -> None:
            if len(frame.payload) == SMALL_BYTES:
                link.send(Output(ids=(31999,)), channel=1, seq=frame.seq)
            elif not frame.payload:
                link.send(Ready(0), channel=1)

        await link.run(on_frame)

    async def over_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mode, size = await reader.readexactly(1), int.from_bytes(await reader.readexactly(8), "little")
        if mode == BULK:
            while size > 0:
                size -= len(await reader.read(PIECE_BYTES))
            writer.write(bytes(REPLY_BYTES))
        else:
            for _ in range(size):
                await reader.readexactly(SMALL_BYTES)
                writer.write(bytes(REPLY_BYTES))
        await writer.drain()

    async def run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            engine = await start_engine(folder)
            await engine.serve(PROTOCOL, self.over_link)
            await engine._p2p.add_binary_stream_handler(
                BARE_STREAM, lambda _info, reader, writer: self.over_stream(reader, writer)
            )
            tcp = await asyncio.start_server(self.over_stream, "127.0.0.1", 0)
            print(json.dumps([await engine.addresses(), tcp.sockets[0].getsockname()[1]]), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            await engine.close()


class Client:
    """Measures, from this process, with everything open before the clock starts."""

    def __init__(self, engine: Engine, peer: str, tcp_port: int, processes: list[psutil.Process]) -> None:
        self._engine = engine
        self._peer = peer
        self._tcp_port = tcp_port
        self._processes = processes
        self._answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left: Iterator[int] = iter(())
        self.link_bytes_per_round_trip = 0.0

    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    async def timed(self, work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
        """Return the seconds of wall time and of all processes' CPU time that `work` takes."""
        cpu_s, started_s = self.cpu_s(), time.perf_counter()
        await work()
        return time.perf_counter() - started_s, self.cpu_s() - cpu_s

    async def link(self, mib: int, round_trips: int) -> dict[str, float]:
        link = await Link.connect(self._engine, self._peer, PROTOCOL, HELLO, config=LinkConfig())
        piece, small = bytes(PIECE_BYTES), bytes(SMALL_BYTES)

        def on_frame(_frame: Frame, body: Body) -> None:
            if isinstance(body, Output) and next(self._left, None) is not None:
                link.send(Chunk(), channel=1, seq=body.ids[0], payload=[small])
            else:
                self._answer.set_result(None)

        reading = asyncio.ensure_future(link.run(on_frame))

        async def bulk() -> None:
            self._answer = asyncio.get_running_loop().create_future()
            for number in range(mib):
                link.send(Chunk(), channel=1, seq=number, payload=[piece])
                await link.drain()
            link.send(Chunk(), channel=1, seq=mib)
            await self._answer

        async def pingpong() -> None:
            self._answer = asyncio.get_running_loop().create_future()
            self._left = iter(range(round_trips - 1))
            link.send(Chunk(), channel=1, payload=[small])
            await self._answer

        figures = self.figures(mib, round_trips, await self.timed(bulk), bulk=True)
        before = link.sent_bytes + link.received_bytes
        figures |= self.figures(mib, round_trips, await self.timed(pingpong), bulk=False)
        self.link_bytes_per_round_trip = (link.sent_bytes + link.received_bytes - before) / round_trips
        await link.close()
        await reading
        return figures

    async def bare(self, mib: int, round_trips: int) -> dict[str, float]:
        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            _, reader, writer = await self._engine._p2p.call_binary_stream_handler(
                PeerID.from_base58(self._peer), BARE_STREAM
            )
            return reader, writer

        return await self.streams(connect, mib, round_trips)

    async def tcp(self, mib: int, round_trips: int) -> dict[str, float]:
        return await self.streams(lambda: asyncio.open_connection("127.0.0.1", self._tcp_port), mib, round_trips)

    async def streams(
        self,
        connect: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]],
        mib: int,
        round_trips: int,
    ) -> dict[str, float]:
        piece, small = bytes(PIECE_BYTES), bytes(SMALL_BYTES)
        reader, writer = await connect()

        async def bulk() -> None:
            writer.write(BULK + (mib * PIECE_BYTES).to_bytes(8, "little"))
            for _ in range(mib):
                writer.write(piece)
                await writer.drain()
            await reader.readexactly(REPLY_BYTES)

        figures = self.figures(mib, round_trips, await self.timed(bulk), bulk=True)
        writer.close()
        reader, writer = await connect()

        async def pingpong() -> None:
            writer.write(PINGPONG + round_trips.to_bytes(8, "little"))
            for _ in range(round_trips):
                writer.write(small)
                await reader.readexactly(REPLY_BYTES)

        figures |= self.figures(mib, round_trips, await self.timed(pingpong), bulk=False)
        writer.close()
        return figures

    @staticmethod
    def figures(mib: int, round_trips: int, seconds: tuple[float, float], *, bulk: bool) -> dict[str, float]:
        wall_s, cpu_s = seconds
        if not bulk:
            return {"round_trip_us": wall_s / round_trips * 1e6, "cpu_us_per_round_trip": cpu_s / round_trips * 1e6}
        gigabytes = mib * PIECE_BYTES / 1e9
        return {"mb_per_s": gigabytes * 1e3 / wall_s, "cpu_s_per_gb": cpu_s / gigabytes}


def spawn_server() -> tuple[subprocess.Popen[str], list[str], int]:
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    addresses, tcp_port = json.loads(server.stdout.readline())
    return server, addresses, tcp_port


async def measure(mib: int, round_trips: int, runs: int) -> dict[str, object]:
    server, addresses, tcp_port = spawn_server()
    with tempfile.TemporaryDirectory() as folder:
        engine = await start_engine(folder)
        try:
            assert await engine.connect(addresses, timeout_s=5.0)
            parents = [psutil.Process(), psutil.Process(server.pid)]
            processes = [
                *parents,
                *(child for parent in parents for child in parent.children() if child.pid != server.pid),
            ]
            client = Client(engine, addresses[0].rpartition("/")[2], tcp_port, processes)
            subjects = {"link": client.link, "bare": client.bare, "tcp": client.tcp}
            await client.link(8, 100)
            await client.bare(8, 100)
            results = [
                {name: await subject(mib, round_trips) for name, subject in subjects.items()} for _ in range(runs)
            ]
        finally:
            assert server.stdin is not None
            server.stdin.close()
            await engine.close()
            server.wait()
    return {"mib": mib, "round_trips": round_trips, "runs": runs, **summary(results)} | {
        "link_bytes_per_round_trip": client.link_bytes_per_round_trip,
        "link_overhead_bytes_per_round_trip": client.link_bytes_per_round_trip - SMALL_BYTES,
    }


def summary(results: list[dict[str, dict[str, float]]]) -> dict[str, object]:
    figures = {
        name: {figure: round(statistics.median(run[name][figure] for run in results), 3) for figure in results[0][name]}
        for name in results[0]
    }
    ratios = [run["link"]["mb_per_s"] / run["bare"]["mb_per_s"] for run in results]
    slower = [run["link"]["round_trip_us"] / run["bare"]["round_trip_us"] for run in results]
    return {
        **figures,
        "throughput_link_over_bare": round(statistics.median(ratios), 3),
        "throughput_link_over_bare_each": [round(ratio, 3) for ratio in ratios],
        "round_trip_link_over_bare": round(statistics.median(slower), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--round-trips", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    uvloop.install()
    if arguments.serve:
        asyncio.run(Server().run())
    else:
        print(json.dumps(asyncio.run(measure(arguments.mib, arguments.round_trips, arguments.runs)), indent=2))


if __name__ == "__main__":
    main()
