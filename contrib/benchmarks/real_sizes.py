"""Training and serving at the sizes that people run, against one process. Prints JSON.

    python contrib/benchmarks/real_sizes.py [PART …] [--small]

    training        GPT-2 of 184 M parameters: 2 replicas of 1 stage, and 2 stages, against one process; losses against `--local`.
    killed          the same with one of two replicas killed -9 in the middle of averaging.
    training_large  Llama of 1.1 B parameters in 2 stages with SGD
    serving         Llama of 1.1 B in bf16 over 2 nodes by invite: start, one stream, a prompt, eight sessions, against local
    sessions        64 sessions at once over 2 nodes: the times between tokens
    context         16,384 positions over 2 nodes and a spare, the first hop killed at 12,288

Every node is a process of its own with one thread and its own p2pd, on loopback. `--small` runs the same on models of a few
hundred kB. Weights and many nodes at once have benchmarks of their own (weights.py, crowd.py).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import uvloop
from baseline import LocalProcess
from plain_decoding import PlainClient, joined
from training import Bench, tokens_per_s

from swarmnode.localswarm import LocalSwarm, NodeProcess

READY_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of the models, and of the work that is done with them."""

    gpt2: dict[str, int]
    llama: dict[str, int]
    sequence: int
    batch: int
    large_batch: int
    prompt: int
    new: int
    prefill: int
    sessions: int
    positions: int


REAL = Sizes(
    gpt2={"n_embd": 1024, "n_layer": 12, "n_head": 16, "n_positions": 1024, "vocab_size": 32000},
    llama={
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
    },
    sequence=128, batch=64, large_batch=4, prompt=32, new=32, prefill=256, sessions=64, positions=16384,
)  # fmt: skip
SMALL = Sizes(
    gpt2={"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 256},
    llama={
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 2048,
    },
    sequence=32, batch=8, large_batch=4, prompt=16, new=32, prefill=64, sessions=16, positions=512,
)  # fmt: skip


# -- models


def make_gpt2(folder: Path, shape: dict[str, int]) -> None:
    """Save a random GPT-2 in float32."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)


def make_llama(folder: Path, shape: dict[str, int], *, dtype: str) -> None:
    """Save a random Llama in `dtype`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)


def halves(units: int) -> list[str]:
    """Return the spans of two stages with half of the units each."""
    return [f"0:{units // 2}", f"{units // 2}:{units}"]


def equal_stages(gpt2: dict[str, int]) -> list[str]:
    """Return spans of two stages that compute equally much: a layer multiplies by 12 H^2 weights, the head by V H."""
    layers, layer, head = gpt2["n_layer"], 12 * gpt2["n_embd"] ** 2, gpt2["vocab_size"] * gpt2["n_embd"]
    first = min(range(1, layers), key=lambda first: max(first * layer, (layers - first) * layer + head))
    return [f"0:{first + 1}", f"{first + 1}:{layers + 2}"]


# -- memory


@contextmanager
def peak_memory(pids: Callable[[], list[int]]) -> Iterator[dict[str, float]]:
    """Yield a dict whose `peak_mb` is the largest resident memory of any one of the processes, read ten times a second."""
    result = {"peak_mb": 0.0}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            for pid in pids():
                try:
                    resident = psutil.Process(pid).memory_info().rss / 1e6
                except psutil.NoSuchProcess:
                    continue
                result["peak_mb"] = round(max(result["peak_mb"], resident), 1)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield result
    finally:
        over.set()
        looking.join()


# -- training


def settings(sizes: Sizes, batch: int, microbatch: int, steps: int, *extra: str) -> list[str]:
    """Return the arguments of a run on the source of the standard library's typing module, as bytes."""
    return [
        "--data", typing.__file__, "--steps", str(steps), "--batch", str(batch), "--microbatch", str(microbatch),
        "--sequence", str(sizes.sequence), "--checkpoint-steps", "1000", *extra,
    ]  # fmt: skip


def rows(log: Path) -> list[dict[str, Any]]:
    """Return the trainer's log, a row for each step."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def deviation(log: Path, truth: Path) -> float:
    """Return the largest relative difference of a step's loss."""
    pairs = zip(rows(log), rows(truth), strict=True)
    return max(abs(ours["loss"] - theirs["loss"]) / abs(theirs["loss"]) for ours, theirs in pairs)


def training(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Train on two nodes, as replicas and as stages, against one process."""
    make_gpt2(folder / "model", sizes.gpt2)
    units = sizes.gpt2["n_layer"] + 2
    bench = Bench(folder, folder / "model", settings(sizes, sizes.batch, 4, 3))
    truth = bench.alone()
    report: dict[str, Any] = {"one_process_tokens_per_s": round(tokens_per_s(truth), 1)}
    for shape, spans in {"2 replicas": [f"0:{units}"] * 2, "2 stages": equal_stages(sizes.gpt2)}.items():
        log = bench.swarm(spans)
        report[shape] = {
            "ratio": round(tokens_per_s(log) / tokens_per_s(truth), 3),
            "loss_deviation": deviation(log, truth),
            "step_s": [row["step_s"] for row in rows(log)],
        }
    return report


def killed(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Kill one of two replicas while they average: after 85 % of the seconds of the step before."""
    make_gpt2(folder / "model", sizes.gpt2)
    units = sizes.gpt2["n_layer"] + 2
    bench = Bench(folder, folder / "model", settings(sizes, sizes.batch, 4, 6))

    def kill(nodes: list[NodeProcess], trainer: NodeProcess) -> None:
        second = trainer.wait_until(lambda event: event.get("step") == 1, "the second step", READY_TIMEOUT_S)
        time.sleep(0.85 * second["step_s"])
        nodes[1].kill()

    truth, log = bench.alone(), bench.swarm([f"0:{units}"] * 2, meanwhile=kill)
    steps_s = [row["step_s"] for row in rows(log)]
    together_s, alone_s = steps_s[1], statistics.median(steps_s[3:])
    return {
        "step_s": steps_s,
        "lost_s": round(max(steps_s[2:]) - alone_s, 2),
        "lost_steps": round((max(steps_s[2:]) - alone_s) / max(together_s, 1e-9), 2),
        "loss_deviation": deviation(log, truth),
    }


def training_large(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Train the large model in two stages, and return the peak memory of a node, too."""
    make_llama(folder / "model", sizes.llama, dtype="float32")
    units = sizes.llama["num_hidden_layers"] + 2
    extra = ["--optimizer", "sgd", "--lr", "0.01"]
    bench = Bench(folder, folder / "model", settings(sizes, sizes.large_batch, 1, 3, *extra))
    pids: list[int] = []
    with peak_memory(lambda: pids) as memory:
        log = bench.swarm(halves(units), meanwhile=lambda nodes, _trainer: pids.extend(node.pid for node in nodes))
    return {
        "loss": [row["loss"] for row in rows(log)],
        "step_s": [row["step_s"] for row in rows(log)],
        "tokens_per_s": round(tokens_per_s(log), 1),
        **memory,
    }


# -- serving


def prompt_of(sizes: Sizes, length: int, number: int = 0) -> list[int]:
    """Return `length` token ids that differ by `number`."""
    return [5 + (7 * position + 13 * number) % (sizes.llama["vocab_size"] - 5) for position in range(length)]


def served(
    folder: Path, spans: list[str], ask: Callable[[LocalSwarm, PlainClient, list[NodeProcess]], Any], **members: Any
) -> dict[str, Any]:
    """Serve the checkpoint in `folder / "model"` by nodes that come with an invite, and let `ask` use them."""
    with LocalSwarm(folder / "swarm") as swarm:
        swarm.folder.mkdir()
        invite = swarm.create(folder / "model")
        swarm.bootstrap()
        started_s = time.perf_counter()
        nodes = [
            swarm.node(f"n{number}", "--span", span, *members.get("extra", ()), swarm=invite)
            for number, span in enumerate(spans)
        ]
        for node in nodes:
            node.wait_for("ready", READY_TIMEOUT_S)
        start_s = time.perf_counter() - started_s

        async def live() -> dict[str, Any]:
            client = await joined(swarm, len(nodes))
            try:
                return dict(await ask(swarm, client, nodes))
            finally:
                await client.close()

        return {"start_to_ready_s": round(start_s, 2), **uvloop.run(live())}


async def together(client: PlainClient, prompts: list[list[int]], new: int) -> tuple[float, list[list[float]]]:
    """Generate for all prompts at once: tokens per second of all, and the times between tokens of each."""
    gaps: list[list[float]] = []

    async def one(prompt: list[int]) -> int:
        stream = await client.stream(prompt, max_new_tokens=new)
        moments = [time.perf_counter() async for _ in stream]
        gaps.append([right - left for left, right in itertools.pairwise(moments)])
        return len(moments)

    started_s = time.perf_counter()
    tokens = await asyncio.gather(*map(one, prompts))
    return sum(tokens) / (time.perf_counter() - started_s), gaps


def serving(sizes: Sizes, folder: Path, repeats: int = 3) -> dict[str, Any]:
    """Measure one stream, a prompt and eight sessions, each beside transformers in one process."""
    make_llama(folder / "model", sizes.llama, dtype="bfloat16")
    units = sizes.llama["num_hidden_layers"] + 2
    lengths = {"prompt": sizes.prompt, "new": sizes.new, "prefill": sizes.prefill}
    with LocalProcess(folder / "model", **lengths, dtype="bfloat16") as local:

        async def ask(_swarm: LocalSwarm, client: PlainClient, _nodes: list[NodeProcess]) -> dict[str, Any]:
            await client.generate(prompt_of(sizes, sizes.prompt), max_new_tokens=4)
            decode, prefill, eight, speeds = [], [], [], []
            for _ in range(repeats):
                alone = await asyncio.to_thread(local.measure)
                ours = await client.generate(prompt_of(sizes, sizes.prompt), max_new_tokens=sizes.new)
                first = await client.generate(prompt_of(sizes, sizes.prefill), max_new_tokens=1)
                rate, _ = await together(client, [prompt_of(sizes, sizes.prompt, n) for n in range(8)], sizes.new)
                decode.append(ours.tokens_per_s / alone["decode_tokens_per_s"])
                prefill.append(alone["prefill_s"] / first.first_token_s)
                eight.append(rate / ours.tokens_per_s)
                speeds.append(ours.tokens_per_s)
            return {
                "tokens_per_s": round(statistics.median(speeds), 2),
                "decode_of_local": round(statistics.median(decode), 3),
                "prompt_of_local": round(statistics.median(prefill), 3),
                "eight_of_one": round(statistics.median(eight), 3),
            }

        return served(folder, halves(units), ask, extra=["--dtype", "bfloat16"])


def sessions(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Measure the times between tokens of many sessions at once: median, 99th percentile and longest."""
    make_llama(folder / "model", SMALL.llama, dtype="float32")

    async def ask(_swarm: LocalSwarm, client: PlainClient, _nodes: list[NodeProcess]) -> dict[str, Any]:
        prompts = [prompt_of(SMALL, SMALL.prompt, number) for number in range(sizes.sessions)]
        await together(client, prompts[:4], 4)
        rate, gaps = await together(client, prompts, 64)
        everything = sorted(itertools.chain(*gaps))
        median_s, p99_s = statistics.median(everything), everything[int(0.99 * len(everything))]
        return {
            "sessions": len(gaps),
            "tokens_per_s": round(rate, 1),
            "median_ms": round(median_s * 1e3, 2),
            "p99_ms": round(p99_s * 1e3, 2),
            "longest_ms": round(everything[-1] * 1e3, 2),
            "p99_of_median": round(p99_s / median_s, 2),
        }

    return served(folder, halves(SMALL.llama["num_hidden_layers"] + 2), ask)


def context(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Measure a long text through a hop that dies at three quarters of it, the same text undisturbed, and a prefill of as much."""
    shape = {**SMALL.llama, "max_position_embeddings": sizes.positions}
    make_llama(folder / "model", shape, dtype="float32")
    new, before = sizes.positions * 5 // 16, sizes.positions // 16
    prompt = prompt_of(SMALL, sizes.positions - new)

    async def ask(_swarm: LocalSwarm, client: PlainClient, nodes: list[NodeProcess]) -> dict[str, Any]:
        truth = await client.generate(prompt, max_new_tokens=new)
        stream = await client.stream(prompt, max_new_tokens=new)
        number = 0
        async for _ in stream:
            number += 1
            if number == before:
                next(node for node in nodes if node.peer == stream.result.route[0].peer).kill()
        return {
            "positions": len(prompt) + new,
            "prefill_s": round(truth.first_token_s, 2),
            "resumed_s": round(stream.result.longest_stall_s, 2),
            "same_text": stream.result.ids == truth.ids,
        }

    first, second = halves(SMALL.llama["num_hidden_layers"] + 2)
    return served(folder, [first, first, second], ask)


PARTS: dict[str, Callable[[Sizes, Path], dict[str, Any]]] = {
    part.__name__: part for part in (training, killed, training_large, serving, sessions, context)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*PARTS, []], help=", ".join(PARTS))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    from transformers.utils import logging

    logging.disable_progress_bar()
    report: dict[str, Any] = {}
    for part in options.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
            report[part] = PARTS[part](SMALL if options.small else REAL, Path(name))
        print(json.dumps({part: report[part]}), flush=True)


if __name__ == "__main__":
    main()
