"""Tokens per second of adapters that two nodes tune, against peft in one process. Prints JSON.

    python contrib/benchmarks/tune.py [--steps 6] [--batch 16] [--microbatch 4] [--only two-stages,users,delay,kill,serving]

A random Llama in float32, LoRA of rank 16 on all linear layers, sequence 128, bytes of the standard library, no codec. Each node
is a process with one thread and a p2pd of its own, on loopback. Medians leave out the first step. peft must be installed for its
rows; its runs come before and after the swarm's. `kill`: a holder dies; finished steps that are computed again are counted, with
--checkpoint-steps 1 and 4. `serving`: 99th percentile of the time between tokens of a text without drafts,
while another user tunes, and alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus import read_corpus
from delaying_relay import DelayingRelay, free_port
from plain_decoding import joined

from swarmnode.localswarm import LocalSwarm, NodeProcess

SEQUENCE, RANK = 128, 16
TIMEOUT_S = 3600.0
ROWS = ("two-stages", "users", "delay", "kill", "serving")
PEFT = """
import json, sys, time
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM
model, data, steps, batch, microbatch, sequence, rank, threads = sys.argv[1:]
steps, batch, microbatch, sequence, rank = map(int, (steps, batch, microbatch, sequence, rank))
torch.set_num_threads(int(threads))
base = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
tuned = get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW((p for p in tuned.parameters() if p.requires_grad), lr=2e-4, weight_decay=0.0)
ids = torch.tensor(list(open(data, "rb").read()[: steps * batch * sequence])).view(-1, microbatch, sequence)
took = []
for step in range(steps):
    began = time.perf_counter()
    for number in range(batch // microbatch):
        rows = ids[(step * (batch // microbatch) + number) % len(ids)]
        (tuned(input_ids=rows, labels=rows).loss / (batch // microbatch)).backward()
    torch.nn.utils.clip_grad_norm_(tuned.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    took.append(time.perf_counter() - began)
print(json.dumps([batch * sequence / one for one in took]))
"""


@dataclass(frozen=True)
class Sizes:
    """Size of the model and of the steps."""

    steps: int
    batch: int
    microbatch: int
    hidden: int
    layers: int


def make_model(folder: Path, sizes: Sizes) -> None:
    """Save a random Llama on bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden * 8 // 3,
        num_hidden_layers=sizes.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1024,
        max_position_embeddings=SEQUENCE,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class Bench:
    """Tunings of one model with one set of sizes, by peft and by swarms."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.folder, self.sizes = folder, sizes
        self.model, self.data = folder / "model", folder / "data.txt"
        make_model(self.model, sizes)
        size = 4 * sizes.steps * sizes.batch * SEQUENCE
        self.data.write_bytes(bytes(read_corpus()[:size].tolist()))
        self._runs = 0

    def peft(self, threads: int) -> float:
        """Return the median tokens/s of peft in one process."""
        sizes = self.sizes
        numbers = (sizes.steps, sizes.batch, sizes.microbatch, SEQUENCE, RANK, threads)
        arguments = [sys.executable, "-c", PEFT, str(self.model), str(self.data), *map(str, numbers)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
        return statistics.median(json.loads(done.stdout.splitlines()[-1])[1:])

    @contextlib.contextmanager
    def swarm(self, spans: list[str], relay: DelayingRelay | None = None) -> Iterator[LocalSwarm]:
        """Run a swarm with a node for each span."""
        self._runs += 1
        folder = self.folder / str(self._runs)
        folder.mkdir()
        with LocalSwarm(folder) as local:
            local.create(self.model)
            local.bootstrap()
            nodes = []
            for number, span in enumerate(spans):
                extra = ["--span", span, "--tune-share", "50%", "--memory", "4GB"]
                if relay is not None:
                    port = free_port()
                    listens = f"/ip4/127.0.0.1/tcp/{port}"
                    announces = f"/ip4/127.0.0.1/tcp/{relay.to(port)}"
                    extra += ["--no-direct", "--host-maddr", listens, "--announce-maddr", announces]
                nodes.append(local.node(f"node-{number}", *extra))
            for node in nodes:
                node.wait_for("ready")
            yield local

    def start(self, local: LocalSwarm, name: str, *extra: str) -> NodeProcess:
        """Start a tuning, without waiting for it."""
        sizes = self.sizes
        settings = [
            *("--data", str(self.data), "--steps", str(sizes.steps), "--batch", str(sizes.batch)),
            *("--microbatch", str(sizes.microbatch), "--sequence", str(SEQUENCE), "--rank", str(RANK)),
            *("--out", str(local.folder / name), "--log", str(local.folder / f"{name}.log")),
        ]
        return local.start(name, ["tune", str(local.file), "--json", *settings, *extra])

    def tokens_per_s(self, local: LocalSwarm, *names: str, extra: tuple[str, ...] = ()) -> float:
        """Tune with as many users at once as there are names, and return their tokens/s together."""
        running = [self.start(local, name, *extra) for name in names]
        for one in running:
            if one.finish(TIMEOUT_S):
                raise SystemExit(f"{one.name} failed: {one.tail()}")
        return sum(log_tokens_per_s(local.folder / f"{name}.log") for name in names)


def log_tokens_per_s(log: Path) -> float:
    """Return the median tokens/s of the steps after the first."""
    return statistics.median(json.loads(line)["tokens_per_s"] for line in log.read_text().splitlines()[1:])


def two_stages(bench: Bench, halves: list[str]) -> dict[str, float]:
    """Return tokens/s of two stages of one thread, and of peft with one thread and two, before and after."""
    has_peft = importlib.util.find_spec("peft") is not None
    before = [bench.peft(threads) for threads in (1, 2)] if has_peft else []
    with bench.swarm(halves) as local:
        found = {"two_stages": bench.tokens_per_s(local, "one", extra=("--window", "4"))}
    if not has_peft:
        return found
    one, two = (statistics.mean(pair) for pair in zip(before, [bench.peft(threads) for threads in (1, 2)], strict=True))
    found |= {"peft_1_thread": one, "peft_2_threads": two, "ratio_to_peft": found["two_stages"] / one}
    return found


def users(bench: Bench, halves: list[str]) -> dict[str, float]:
    """Return tokens/s of four users together with one microbatch in flight each, and of one such user."""
    with bench.swarm(halves) as local:
        one = bench.tokens_per_s(local, "alone", extra=("--window", "1"))
        four = bench.tokens_per_s(local, *"abcd", extra=("--window", "1"))
    return {"one_user": one, "four_users": four, "ratio_of_users": four / one}


def delay(bench: Bench, halves: list[str]) -> dict[str, float]:
    """Return tokens/s over relays with 25 ms one way and 4 microbatches in flight, and over relays without a delay."""
    rates = {}
    for delay_s in (0.0, 0.025):
        with DelayingRelay(delay_s) as relay, bench.swarm(halves, relay) as local:
            rates[delay_s] = bench.tokens_per_s(local, "far", extra=("--window", "4"))
    return {"0_ms": rates[0.0], "25_ms": rates[0.025], "ratio_of_delay": rates[0.025] / rates[0.0]}


def kill(bench: Bench, halves: list[str]) -> dict[str, Any]:
    """Return the finished steps that a kill costs with --checkpoint-steps 1 and 4, and whether the log has each step once."""
    found: dict[str, Any] = {}
    for steps in (1, 4):
        lost, is_whole = steps_lost(bench, halves, steps)
        found |= {f"steps_lost_of_{steps}": lost, f"every_step_once_of_{steps}": is_whole}
    return found


def steps_lost(bench: Bench, halves: list[str], checkpoint_steps: int) -> tuple[int, bool]:
    """Kill a holder in the middle of a tuning. Returns the steps computed again, and whether the log has each step once."""
    with bench.swarm([*halves, *halves]) as local:
        tuning = bench.start(local, "struck", "--checkpoint-steps", str(checkpoint_steps))
        log = local.folder / "struck.log"
        while not log.exists() or len(log.read_text().splitlines()) < 3:
            time.sleep(0.05)
        holds = re.search(r"^(node-\d+) holds layers", tuning.tail(), re.MULTILINE)
        struck = next(node for node in local.members if holds is not None and node.name == holds[1])
        struck.kill()
        if tuning.finish(TIMEOUT_S):
            raise SystemExit(tuning.tail())
        steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
        again = re.search(r"\((\d+) steps? computed again after", tuning.tail())
        if again is None:
            raise SystemExit(f"the killed node was on no route: {tuning.tail()}")
        return int(again[1]), steps == list(range(bench.sizes.steps))


def serving(bench: Bench, halves: list[str]) -> dict[str, float]:
    """Return the 99th percentile of the seconds between tokens of one text, without and beside a tuning."""
    with bench.swarm(halves) as local:
        calm = gaps_s(local)
        tuning = bench.start(local, "beside")
        while not (local.folder / "beside.log").exists():
            time.sleep(0.05)
        busy = gaps_s(local)
        tuning.stop()
    return {"p99_calm_s": calm, "p99_tuning_s": busy, "ratio_of_p99": busy / calm}


def gaps_s(local: LocalSwarm) -> float:
    """Return the 99th percentile of the seconds between tokens of a text of 96 tokens."""
    times: list[float] = []

    async def read() -> None:
        client = await joined(local, 2)
        async with client:
            async for _ in await client.stream([1, 2, 3, 4], max_new_tokens=96):
                times.append(time.perf_counter())

    asyncio.run(read())
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times[8:]))
    return gaps[int(0.99 * len(gaps))]


def main() -> None:
    """Run the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--only", default=",".join(ROWS))
    options = parser.parse_args()
    sizes = Sizes(options.steps, options.batch, options.microbatch, options.hidden, options.layers)
    cut = (sizes.layers + 2) // 2
    halves = [f"0:{cut}", f"{cut}:{sizes.layers + 2}"]
    works = {"two-stages": two_stages, "users": users, "delay": delay, "kill": kill, "serving": serving}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as path:
        bench = Bench(Path(path), sizes)
        for row in options.only.split(","):
            found |= works[row](bench, halves)
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}))


if __name__ == "__main__":
    main()
