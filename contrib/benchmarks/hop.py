"""Parts of a hop's microseconds: `python contrib/benchmarks/hop.py [--hops 3] [--tokens 200] [--runs 3]`. Prints JSON.

A random Llama (as serving.py's) over `--hops` nodes, each a process with one thread and its own p2pd, on loopback. One stream is
decoded, without guesses: tokens that come out of one step take no time of their own. The hops' records of it (as `why trace`
shows them) are put beside the time of each part done alone in this process.
They are also put beside round trips of the same bytes over a bare p2pd stream and over plain TCP. Medians, microseconds:

    queue     from a step's arrival until its pass begins.         compute   the pass, with decoding and encoding.
    leave     from the end of the pass until it is written.        way       from one hop's write to the next one's arrival.
    beside_computing     all of a token's time but its passes, for each hop.

`split_of_whole` is all hops' computing over that of one node that holds the whole model, taken before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import link
import psutil
import serving
import uvloop
from plain_decoding import joined

from swarmnode.codec.frames import FrameReader, pack_header
from swarmnode.codec.messages import KIND_OF, Input, encode_body
from swarmnode.codec.tensors import Codec
from swarmnode.localswarm import LocalSwarm
from swarmnode.measuring.trace import Timeline

PROMPT = list(range(5, 5 + serving.PROMPT_TOKENS))


async def decoded(swarm: LocalSwarm, nodes: int, tokens: int) -> Timeline:
    """Return the hops' records of one stream."""
    client = await joined(swarm, nodes)
    try:
        await client.generate(PROMPT, max_new_tokens=16)
        generation = await client.generate(PROMPT, max_new_tokens=tokens)
        return Timeline(await client.traces(bytes.fromhex(generation.trace)))
    finally:
        await client.close()


def stream_over(model: Path, folder: Path, nodes: int, tokens: int) -> dict[str, Any]:
    """Measure one stream over `nodes` nodes: medians over its tokens, in microseconds."""
    with LocalSwarm(folder) as swarm:
        folder.mkdir()
        swarm.create(model)
        swarm.bootstrap()
        for number, span in enumerate(serving.spans(nodes)):
            swarm.node(f"n{number}", "--span", span).wait_for("ready")
        timeline = uvloop.run(decoded(swarm, nodes, tokens))
    timed = [token for token in timeline.tokens() if token.total_us is not None]
    period_us = statistics.median(token.us for token in timed)
    computing_us = [stop.compute_us.median for stop in timeline.stops]
    return {
        "token": period_us,
        "queue": [stop.wait_us.median for stop in timeline.stops],
        "compute": computing_us,
        "leave": [
            statistics.median(step.stay_us - step.wait_us - step.compute_us for step in stop.decoded.values())
            for stop in timeline.stops
        ],
        "way": round(statistics.median(sum(p.us for p in t.parts if p.what == "way") for t in timed) / nodes, 1),
        "beside_computing": round((period_us - sum(computing_us)) / nodes, 1),
    }


def alone_us(work: Callable[[], object], repeats: int = 2000) -> float:
    """Return the median microseconds of one call of `work` in this process."""
    durations = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        durations.append(time.perf_counter() - began_s)
    return round(statistics.median(durations) * 1e6, 2)


def parts_alone() -> dict[str, float]:
    """Return the time of each part of a hop's work on one position's hidden state, done alone."""
    import torch

    from swarmnode.compress.codecs import decode, encode

    torch.set_num_threads(1)
    y_BTH = torch.randn(1, 1, serving.HIDDEN)
    info, payload = encode(y_BTH, Codec.NONE)
    body = Input(info)

    def frame() -> bytes:
        data = encode_body(body)
        return pack_header(KIND_OF[Input], len(data), len(payload), 1, 7) + data + bytes(payload)

    whole = frame()

    def read() -> None:
        reader = FrameReader(1 << 20)
        reader.room()[: len(whole)] = whole
        assert len(list(reader.advance(len(whole)))) == 1

    return {
        "decode": alone_us(lambda: decode(info, payload, device=torch.device("cpu"))),
        "encode": alone_us(lambda: encode(y_BTH, Codec.NONE)),
        "frame_write": alone_us(frame),
        "frame_read": alone_us(read),
    }


async def round_trips(count: int = 2000) -> dict[str, float]:
    """Measure half a round trip of a small frame over a Link, a bare p2pd stream, and TCP."""
    server, addresses, tcp_port = link.spawn_server()
    with tempfile.TemporaryDirectory() as folder:
        engine = await link.start_engine(folder)
        try:
            assert await engine.connect(addresses, timeout_s=5.0)
            client = link.Client(engine, addresses[0].rpartition("/")[2], tcp_port, [psutil.Process()])
            subjects = {"link": client.link, "bare_stream": client.bare, "tcp": client.tcp}
            return {
                name: round((await subject(1, count))["round_trip_us"] / 2, 1) for name, subject in subjects.items()
            }
        finally:
            assert server.stdin is not None
            server.stdin.close()
            await engine.close()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hops", 3), ("tokens", 200), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        folder = Path(name)
        serving.make_model(folder / "model")
        for number in range(options.runs):
            whole = stream_over(folder / "model", folder / f"whole{number}", 1, options.tokens)
            split = stream_over(folder / "model", folder / f"split{number}", options.hops, options.tokens)
            runs.append({"whole": whole, "split": split, "of": sum(split["compute"]) / whole["compute"][0]})
    runs.sort(key=lambda run: run["split"]["beside_computing"])
    middle = runs[len(runs) // 2]
    report = {
        "settings": vars(options),
        "whole_us": middle["whole"],
        "split_us": middle["split"],
        "beside_computing_us": [run["split"]["beside_computing"] for run in runs],
        "split_of_whole": round(statistics.median(run["of"] for run in runs), 3),
        "parts_alone_us": parts_alone(),
        "one_way_us": uvloop.run(round_trips()),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
