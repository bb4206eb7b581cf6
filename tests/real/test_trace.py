"""`swarmnode trace` on real nodes: a generation's time, as the nodes that computed it remember it."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

from swarmnode.cli.trace import parse_trace_id
from swarmnode.roles.measuring.timeline import Timeline
from tests.cli.command import assert_clear, swarmnode
from tests.real.conftest import PROMPT, Stages

TOKENS = 40
HELD_S = 0.6  # a node is held back for; less than what makes a peer lost


def test_trace_of_a_generation(stages: Stages, tmp_path: Path) -> None:
    swarm = str(stages.local.file)
    ids = ",".join(map(str, PROMPT))
    asked = ("generate", swarm, "--ids", ids, "-n", str(TOKENS), "--json", "--verbose", "--log-format", "json")
    done = swarmnode(*asked, home=tmp_path)
    generation = json.loads(done.stdout)
    lines = map(json.loads, done.stderr.splitlines())
    assert generation["trace"] in [
        line.get("trace") for line in lines if line["logger"] == "swarmnode.roles.serving.client"
    ]
    told = json.loads(swarmnode("trace", swarm, generation["trace"], "--json", home=tmp_path).stdout)
    assert [(hop["peer"], hop["span"]) for hop in told["hops"]] == [
        (hop["peer"], hop["span"]) for hop in generation["route"]
    ]
    assert [hop["tokens"] for hop in told["hops"]] == [TOKENS - 1] * 2
    assert len(told["slowest"]) == 5
    slowest = told["slowest"][0]
    assert slowest["seconds"] <= generation["seconds"]
    assert sum(part["seconds"] for part in slowest["parts"]) >= slowest["seconds"] * 0.9
    assert 0 < sum(hop["compute_s"]["median"] for hop in told["hops"]) < generation["seconds"] / TOKENS


async def test_a_node_that_was_held_back_is_seen_in_the_slowest_token(stages: Stages) -> None:
    async with stages.client() as client:
        stream = await client.stream(PROMPT, max_new_tokens=200)
        async for _ in stream:
            if len(stream.result.ids) == 20:
                held = stages.member(stream.result.route[1].peer)
                held.kill(signal.SIGSTOP)
                threading.Timer(HELD_S, held.kill, [signal.SIGCONT]).start()
        assert stream.result.reroutes == 0
        timeline = Timeline(await client.traces(parse_trace_id(stream.result.trace)))
    (slowest,) = timeline.slowest(1)
    assert slowest.us / 1e6 > HELD_S / 2
    assert 20 <= slowest.position - len(PROMPT) < 200
    late = slowest.late
    assert held.peer in (slowest.longest.peer, *((late.source, late.target) if late else ()))


def test_a_session_that_nobody_remembers(stages: Stages, tmp_path: Path) -> None:
    assert_clear(swarmnode("trace", str(stages.local.file), "00" * 16, home=tmp_path), 1, "remembers", "00" * 16)
