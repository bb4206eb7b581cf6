"""`swarmnode why trace` on real nodes: a generation's time, as the nodes that computed it remember it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.command import assert_clear, swarmnode
from tests.real.conftest import Stages
from tests.tiny import PROMPT

TOKENS = 40


def test_trace_of_a_generation(stages: Stages, tmp_path: Path) -> None:
    swarm = str(stages.local.file)
    ids = ",".join(map(str, PROMPT))
    asked = (
        "generate",
        swarm,
        "--ids",
        ids,
        "-n",
        str(TOKENS),
        "--json",
        "--drafts",
        "off",
        "--verbose",
        "--log-format",
        "json",
    )
    done = swarmnode(*asked, home=tmp_path)
    generation = json.loads(done.stdout)
    lines = map(json.loads, done.stderr.splitlines())
    assert generation["trace"] in [
        line.get("trace") for line in lines if line["logger"] == "swarmnode.serving.client.client_session"
    ]
    told = json.loads(swarmnode("why", "trace", swarm, generation["trace"], "--json", home=tmp_path).stdout)
    assert [(hop["peer"], hop["span"]) for hop in told["hops"]] == [
        (hop["peer"], hop["span"]) for hop in generation["route"]
    ]
    assert [hop["tokens"] for hop in told["hops"]] == [TOKENS - 1] * 2
    assert len(told["slowest"]) == 5
    slowest = told["slowest"][0]
    assert slowest["seconds"] <= generation["seconds"]
    assert sum(part["seconds"] for part in slowest["parts"]) >= slowest["seconds"] * 0.9
    assert 0 < sum(hop["compute_s"]["median"] for hop in told["hops"]) < slowest["seconds"]
    assert_clear(swarmnode("why", "trace", swarm, "00" * 16, home=tmp_path), 1, "remembers", "00" * 16)
