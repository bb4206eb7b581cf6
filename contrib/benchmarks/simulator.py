"""The simulator held to reality: tokens/s of real local swarms against what it predicts, for three shapes with unequal speeds.

    python contrib/benchmarks/simulator.py [--seconds 20] [--runs 3]

Real nodes on loopback are throttled (`run --throttle`), so that two cores can carry them; several clients generate one text after
another, without drafts. The same spans, speeds and clients are simulated. Prints JSON: measured and
predicted tokens/s and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from plain_decoding import PlainClient, joined

from swarmnode.localswarm import LocalSwarm
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.model import Model
from swarmnode.simulate.settings import ServeSettings, Settings
from swarmnode.simulate.simulation import Simulation

UNITS = 12
PROMPT = [5, 17, 3, 99, 42, 7, 256, 11, 23, 1, 0, 77, 31, 8, 400, 12]
TOKENS = 48
HOP_S = 0.001  # one way between processes of one machine: framing, wake-ups (RoutingConfig.hop_s)
LOOPBACK_BPS = 10e9
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Shape:
    """Nodes of (span, units/s), and the number of clients that use them at once."""

    name: str
    nodes: tuple[tuple[Span, float], ...]
    clients: int


SHAPES = (
    Shape("chain of three, one client", ((Span(0, 4), 200), (Span(4, 8), 100), (Span(8, 12), 150)), 1),
    Shape(
        "two stages, two replicas, four clients",
        ((Span(0, 6), 200), (Span(0, 6), 100), (Span(6, 12), 150), (Span(6, 12), 75)),
        4,
    ),
    Shape(
        "overlapping spans, six clients",
        ((Span(0, 5), 125), (Span(2, 9), 250), (Span(5, 12), 175), (Span(0, 4), 75), (Span(8, 12), 100)),
        6,
    ),
)


def make_model(folder: Path) -> None:
    """Save a small random Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=UNITS - 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


async def measured_tokens_per_s(shape: Shape, model: Path, folder: Path, seconds: float, runs: int) -> list[float]:
    """Measure tokens/s of a real swarm in each run, after every client has generated a text."""
    with LocalSwarm(folder) as local:
        local.create(model)
        local.bootstrap()
        for number, (span, speed) in enumerate(shape.nodes):
            local.node(f"n{number}", "--span", f"{span.start}:{span.end}", "--throttle", str(speed))
        for member in local.members[1:]:
            member.wait_for("ready")
        client = await asyncio.wait_for(joined(local, len(shape.nodes)), PATIENCE_S)
        try:
            await clients(client, shape.clients, 0.0)
            return [await clients(client, shape.clients, seconds) for _ in range(runs)]
        finally:
            await client.close()


async def clients(client: PlainClient, count: int, seconds: float) -> float:
    """Let `count` clients generate one text after another for `seconds` (one text at least). Returns their tokens/s
    together."""
    began_s = time.perf_counter()

    async def one(number: int) -> int:
        tokens = 0
        while True:
            stream = await client.stream([*PROMPT[:-1], number], max_new_tokens=TOKENS)
            async for _ in stream:
                tokens += time.perf_counter() - began_s <= seconds
            if time.perf_counter() - began_s > seconds:
                return tokens

    return sum(await asyncio.gather(*(one(number) for number in range(count)))) / max(seconds, 1e-9)


def predicted_tokens_per_s(shape: Shape, model: Path, seconds: float, seed: int) -> float:
    """Return the simulated tokens/s of the same swarm."""
    nodes = len(shape.nodes)
    scenario = Scenario(
        name=shape.name,
        regions=(None,) * nodes,
        delay_s=np.full((nodes, nodes), HOP_S) - HOP_S * np.eye(nodes),
        bandwidth_bps=np.full((nodes, nodes), LOOPBACK_BPS),
        gpus=(None,) * nodes,
        peak_flops=(None,) * nodes,
        memory_bytes=(None,) * nodes,
        decode_units_per_s=tuple(speed for _, speed in shape.nodes),
    )
    serve = ServeSettings(prompt_tokens=len(PROMPT), new_tokens=TOKENS, spread=0.0, clients=shape.clients)
    settings = Settings(hours=seconds / 3600, seed=seed, serve=serve)
    spans = [span for span, _ in shape.nodes]
    result = Simulation(scenario, Model.load(model), settings, spans=spans).run()
    return result.measures.totals["tokens"] / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    report = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        for number, shape in enumerate(SHAPES):
            home = Path(folder) / f"swarm{number}"
            home.mkdir()
            measured = asyncio.run(measured_tokens_per_s(shape, model, home, arguments.seconds, arguments.runs))
            predicted = predicted_tokens_per_s(shape, model, arguments.seconds * arguments.runs, seed=number)
            report.append(
                {
                    "shape": shape.name,
                    "measured_tokens_per_s": [round(rate, 2) for rate in measured],
                    "predicted_tokens_per_s": round(predicted, 2),
                    "predicted_over_measured": round(predicted / statistics.median(measured), 3),
                }
            )
    print(json.dumps({"shapes": report}, indent=2))


if __name__ == "__main__":
    main()
