"""Two clusters of two nodes that a slow line joins, real ones: steps as they organise themselves, and as laid by hand. Prints JSON.

    python contrib/benchmarks/live_clusters.py [--runs activations gradients] [--mbps 10] [--delay-ms 20] [--steps 12]
        [--ahead-s 60] [--slower 1]

Nodes are processes of their own with p2pd, throttled, in two network namespaces (`slow_line.py`: root, iproute2). Each may hold all
units. `activations`: what pipelines hand on weighs more than gradients, which is the other way round in `gradients`. `live` begins
with nodes that know nothing of one another; a trainer comes `--ahead-s` after they are ready. Arrangements by hand are nodes with
`--span`, by what each holds. `step_s` is the median of the last half of all steps. `off` is how far forecasts of these were from
them (median of the absolute), `crossed_mb` what went over the line in such a step. `--slower` makes nodes and the line as many
times slower: for machines whose cores are too slow for four nodes at once, where each computes longer than its throttle asks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import typing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slow_line import ADDRESSES, SlowLine
from training import SEQUENCE, make_checkpoint

from swarmnode.localswarm import LocalSwarm, NodeProcess

NODES_OF_PLACE = 2
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Run:
    """A model, and a step of it."""

    hidden: int
    layers: int
    batch: int
    microbatch: int
    unit_s: float  # that a throttled node takes for a microbatch through a unit, there and back

    @property
    def units(self) -> int:
        return self.layers + 2

    @property
    def throttle(self) -> str:
        """Units/s of `run --throttle`: a microbatch is three passes of a prompt, sixteen times as fast as single positions."""
        return str(3 * self.microbatch * SEQUENCE / 16 / self.unit_s)

    def settings(self, steps: int) -> list[str]:
        """Return the arguments of `swarmnode train` for this run."""
        options = {"steps": steps, "batch": self.batch, "microbatch": self.microbatch, "sequence": SEQUENCE}
        named = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return ["--data", typing.__file__, *named, "--compress", "none", "--checkpoint-steps", "1000"]


RUNS = {"activations": Run(128, 6, 256, 4, 0.04), "gradients": Run(256, 6, 16, 4, 0.1)}


def by_hand(units: int) -> dict[str, dict[str, list[str]]]:
    """Return arrangements made by hand: by their names, the spans of the nodes at each place."""
    whole, first, last = f"0:{units}", f"0:{units // 2}", f"{units // 2}:{units}"
    return {
        "a pipeline at each place": {"west": [first, last], "east": [first, last]},
        "a stage at each place": {"west": [first, first], "east": [last, last]},
        "all hold everything": {"west": [whole, whole], "east": [whole, whole]},
        "a pipeline at one place": {"west": [first, last], "east": []},
        "replicas at one place": {"west": [whole, whole], "east": []},
    }


class Bench:
    """Measurement of one model and run on one line."""

    def __init__(self, run: Run, model: Path, line: SlowLine, options: argparse.Namespace) -> None:
        self._run, self._model, self._line = run, model, line
        self._steps: int = options.steps
        self._ahead_s: float = options.ahead_s

    def measure(self, spans: dict[str, list[str]] | None) -> dict[str, Any]:
        """Measure steps of nodes that hold `spans`, or that organise themselves if `spans` is None."""
        with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name, LocalSwarm(Path(name)) as local:
            local.create(self._model, "--mode", "train", "--listen", f"/ip4/{ADDRESSES['west']}/tcp/4001")
            local.bootstrap(inside=self._line.inside("west"))
            nodes = {
                place: [
                    self._node(local, place, number, None if spans is None else spans[place][number])
                    for number in range(NODES_OF_PLACE if spans is None else len(spans[place]))
                ]
                for place in ADDRESSES
            }
            for node in [node for members in nodes.values() for node in members]:
                node.wait_until(lambda event: event["event"] in ("ready", "spare"), "place")
            time.sleep(self._ahead_s if spans is None else 0.0)
            return self._steps_of(local, nodes)

    def _node(self, local: LocalSwarm, place: str, number: int, span: str | None) -> NodeProcess:
        held = () if span is None else ("--span", span)
        listen = ("--host-maddr", f"/ip4/{ADDRESSES[place]}/tcp/0", "--throttle", self._run.throttle, "--threads", "1")
        return local.node(f"{place}-{number}", *listen, *held, inside=self._line.inside(place))

    def _steps_of(self, local: LocalSwarm, nodes: dict[str, list[NodeProcess]]) -> dict[str, Any]:
        log, half = local.folder / "log", self._steps // 2
        trainer = local.trainer(
            "trainer", "--log", str(log), *self._run.settings(self._steps), inside=self._line.inside("west")
        )
        trainer.wait_until(lambda event: event.get("step", 0) >= half, f"step {half}", TIMEOUT_S)
        before_bytes = self._line.crossed_bytes()
        if trainer.finish(TIMEOUT_S):
            raise SystemExit(f"the trainer failed: {trainer.tail()}")
        crossed_bytes = self._line.crossed_bytes() - before_bytes
        steps = [json.loads(written) for written in log.read_text().splitlines()]
        settled = steps[half:]
        off = [abs(step["step_s"] / step["expected_s"] - 1) for step in settled if step["expected_s"]]
        return {
            "step_s": round(statistics.median(step["step_s"] for step in settled), 2),
            "steps_s": [round(step["step_s"], 2) for step in steps],
            "expected_s": [round(step["expected_s"] or 0.0, 2) for step in steps],
            "off": round(statistics.median(off), 3) if off else None,
            "crossed_mb": round(crossed_bytes / len(settled) / 1e6, 2),
            "held": {place: [held_by(node) for node in members] for place, members in nodes.items()},
        }


def held_by(node: NodeProcess) -> list[str]:
    """Return the spans that a node has held, in order, each with the event that announced it."""
    while not node._events.empty():
        event = node._events.get()
        if event is not None:
            node.seen.append(event)
    placed = [event for event in node.seen if event["event"] in ("ready", "moving", "spare")]
    return [f"{event['event']} {':'.join(map(str, event.get('span') or []))}" for event in placed]


def compared(name: str, line: SlowLine, options: argparse.Namespace) -> dict[str, Any]:
    """Measure nodes that organise themselves, beside every arrangement by hand."""
    run = replace(RUNS[name], unit_s=options.slower * RUNS[name].unit_s)
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as folder:
        make_checkpoint(model := Path(folder) / "model", run.layers, run.hidden)
        bench = Bench(run, model, line, options)
        live = bench.measure(None)
        tried = {how: bench.measure(spans) for how, spans in by_hand(run.units).items()}
    best = min(tried, key=lambda how: tried[how]["step_s"])
    return {"live": live, "by hand": tried, "best": best, "of_best": round(live["step_s"] / tried[best]["step_s"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--mbps", type=float, default=10.0, help="bandwidth of the line, each way")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="delay of the line, one way")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ahead-s", type=float, default=60.0, help="seconds for nodes to measure their lines")
    parser.add_argument("--slower", type=float, default=1.0, help="slow nodes and the line down by this factor")
    options = parser.parse_args()
    with SlowLine(delay_s=options.delay_ms / 1000, bits_per_s=1e6 * options.mbps / options.slower) as line:
        for name in options.runs:
            found = {"run": name, **vars(options), **compared(name, line, options)}
            print(json.dumps(found, indent=2), flush=True)


if __name__ == "__main__":
    main()
