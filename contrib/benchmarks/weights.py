"""Weights from peers to ready, against raw streams of the same bytes, and founding a swarm against hashing alone. Prints JSON.

    python contrib/benchmarks/weights.py [--gigabytes 2.2] [--runs 3]

Two bootstrap peers give the weights; a node that has nothing but an invite fetches, loads, and says that it is ready. The raw
baseline takes turns with it: the same bytes, half of them from each of two processes, over bare p2pd streams into one, which
throws them away. `founding` is `describe_files` against plain hashing of the same warm files. Figures are medians over the runs,
ratios within a run. `cpu_s_per_gb` counts all processes of a subject, their p2pds too, until the node is ready; `fetching_` until
it has all bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import uvloop

from swarmnode.localswarm import LocalSwarm, NodeProcess
from swarmnode.net.identity import Identity
from swarmnode.net.interfaces import Stream
from swarmnode.net.libp2p.engine import Engine, EngineConfig
from swarmnode.swarm.storage.content import checkpoint_files, describe_files

PROTOCOL = "/swarmnode/benchmark/1"
PIECE_BYTES = 1 << 20
SOURCES = 2
SHARD_BYTES = 1 << 30
PATIENCE_S = 600.0

T = TypeVar("T")


def make_checkpoint(folder: Path, size_bytes: float) -> int:
    """Write a sharded Llama of hidden 2048 in bf16, with as many layers as `size_bytes` allows, and return its number of units."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary, layer_bytes = 32000, 2 * (2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 5632)
    layers = max(1, round((size_bytes - 4 * vocabulary * 2048) / layer_bytes))
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=4, dtype="bfloat16", bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    noise = (torch.randn(1 << 24) * 0.02).to(torch.bfloat16)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for number, (name, shape) in enumerate(shapes.items()):
        tensor = noise.roll(number).repeat(-(-shape.numel() // len(noise)))[: shape.numel()].view(shape).contiguous()
        if sum(kept.nbytes for kept in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return layers + 2


class Cpu:
    """CPU seconds of processes and all their children since `start`."""

    def __init__(self, pids: Iterable[int]) -> None:
        roots = [psutil.Process(pid) for pid in pids]
        self._processes = [*roots, *(child for root in roots for child in root.children(recursive=True))]
        self._before = self._all()

    def _all(self) -> dict[str, float]:
        spent: dict[str, float] = {}
        for process in self._processes:
            name = "p2pd" if process.name() == "p2pd" else "python"
            spent[name] = spent.get(name, 0.0) + sum(process.cpu_times()[:2])
        return spent

    def spent(self) -> dict[str, float]:
        return {name: seconds - self._before.get(name, 0.0) for name, seconds in self._all().items()}


# -- bare streams


async def start_engine(folder: Path) -> Engine:
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    Identity.load_or_create(folder / "peer.key")
    return await Engine.start(EngineConfig(folder / "peer.key"))


async def give_raw(folder: Path) -> None:
    """Run a source process that sends, on each stream, as many bytes as the opener asks for."""
    engine = await start_engine(folder)
    piece = os.urandom(PIECE_BYTES)

    async def give(stream: Stream) -> None:
        head = memoryview(bytearray(8))
        await stream.read_into(head)
        for _ in range(int.from_bytes(head, "little") // PIECE_BYTES):
            stream.write([piece])
            await stream.drain()
        await stream.read_into(head)  # until the other side has all and closes

    await engine.serve(PROTOCOL, give)
    print(json.dumps(await engine.addresses()), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await engine.close()


async def take_raw(folder: Path, sources: list[list[str]], pids: list[int], size_bytes: int) -> dict[str, float]:
    engine = await start_engine(folder)
    pieces = size_bytes // PIECE_BYTES // len(sources)

    async def take(addresses: list[str]) -> None:
        assert await engine.connect(addresses, timeout_s=5.0)
        stream = await engine.open(addresses[0].rpartition("/")[2], PROTOCOL, timeout_s=5.0)
        stream.write([(pieces * PIECE_BYTES).to_bytes(8, "little")])
        buffer, left = memoryview(bytearray(PIECE_BYTES)), pieces * PIECE_BYTES
        while left:
            left -= await stream.read_into(buffer)
        await stream.close()

    cpu, began_s = Cpu([os.getpid(), *pids]), time.perf_counter()
    await asyncio.gather(*map(take, sources))
    seconds, spent = time.perf_counter() - began_s, cpu.spent()
    await engine.close()
    return figures(seconds, spent, pieces * PIECE_BYTES * len(sources))


def raw(folder: Path, size_bytes: int) -> dict[str, float]:
    """Measure the rate of two bare sources that send into one process."""
    sources = [
        subprocess.Popen(
            [sys.executable, __file__, "--give", str(folder / f"raw{number}")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(SOURCES)
    ]
    try:
        addresses = [json.loads(source.stdout.readline()) for source in sources if source.stdout is not None]
        pids = [source.pid for source in sources]
        return uvloop.run(take_raw(folder / "raw", addresses, pids, size_bytes))
    finally:
        for source in sources:
            source.communicate("\n")


# -- weights


def figures(seconds: float, spent: dict[str, float], size_bytes: int) -> dict[str, float]:
    gigabytes = size_bytes / 1e9
    return {
        "mb_per_s": size_bytes / 1e6 / seconds,
        **{f"{name}_cpu_s_per_gb": cpu_s / gigabytes for name, cpu_s in spent.items()},
    }


def fetched(
    swarm: LocalSwarm, invite: str, units: int, number: int, sources: list[NodeProcess], size_bytes: int
) -> dict[str, Any]:
    """Start one node and measure it from its first request for weights until it is ready."""
    node = swarm.node(f"node{number}", "--span", f"0:{units}", swarm=invite)
    node.wait_for("machine")
    cpu = Cpu([node.pid, *(source.pid for source in sources)])
    node.wait_for("loading")
    began_s = time.perf_counter()
    node.wait_until(lambda event: event.get("done_bytes", 0) == event.get("total_bytes", 1), "weights", PATIENCE_S)
    fetched_s, fetching = time.perf_counter() - began_s, cpu.spent()
    node.wait_for("ready", PATIENCE_S)
    ready_s = time.perf_counter() - began_s
    spent = cpu.spent()
    node.stop()
    shutil.rmtree(node.home)
    return {
        "fetched_mb_per_s": size_bytes / 1e6 / fetched_s,
        **{f"fetching_{name}_cpu_s_per_gb": cpu_s / size_bytes * 1e9 for name, cpu_s in fetching.items()},
        "ready_s": ready_s,
        **figures(ready_s, spent, size_bytes),
    }


def timed(work: Callable[[], T]) -> tuple[T, float, float]:
    """Return the result of `work`, its wall seconds and its CPU seconds."""
    cpu_s, began_s = time.process_time(), time.perf_counter()
    result = work()
    return result, time.perf_counter() - began_s, time.process_time() - cpu_s


def plain_hash(path: Path) -> bytes:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.digest()


def founding(model: Path) -> dict[str, float]:
    """Measure the rate of hashing a model as `create` does, beside plain sha256 of each file with a thread for each core."""
    files = checkpoint_files(model)
    total = sum(file.stat().st_size for file in files)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        _, plain_s, plain_cpu_s = timed(lambda: list(pool.map(plain_hash, files)))
    _, ours_s, ours_cpu_s = timed(lambda: describe_files(files))
    return {
        "mb_per_s": total / 1e6 / ours_s,
        "plain_mb_per_s": total / 1e6 / plain_s,
        "over_plain": plain_s / ours_s,
        "cpu_s_per_gb": ours_cpu_s / total * 1e9,
        "plain_cpu_s_per_gb": plain_cpu_s / total * 1e9,
    }


def measure(gigabytes: float, runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        units = make_checkpoint(folder / "model", gigabytes * 1e9)
        size_bytes = sum(file.stat().st_size for file in checkpoint_files(folder / "model"))
        founded = [founding(folder / "model") for _ in range(runs)]
        streams, weights = [], []
        with LocalSwarm(folder) as swarm:
            invite = swarm.create(folder / "model")
            sources = [swarm.bootstrap()]
            sources += [swarm.bootstrap(name=f"door{number}") for number in range(1, SOURCES)]
            for number in range(runs):
                streams.append(raw(folder, size_bytes))
                weights.append(fetched(swarm, invite, units, number, sources, size_bytes))
    ratios = [ours["mb_per_s"] / bare["mb_per_s"] for ours, bare in zip(weights, streams, strict=True)]
    fetches = [ours["fetched_mb_per_s"] / bare["mb_per_s"] for ours, bare in zip(weights, streams, strict=True)]
    return {
        "bytes": size_bytes,
        "runs": runs,
        "raw": medians(streams),
        "weights": medians(weights),
        "fetched_over_raw": round(statistics.median(fetches), 3),
        "ready_over_raw": round(statistics.median(ratios), 3),
        "ready_over_raw_each": [round(ratio, 3) for ratio in ratios],
        "founding": medians(founded),
    }


def medians(results: list[dict[str, float]]) -> dict[str, float]:
    return {figure: round(statistics.median(run[figure] for run in results), 3) for figure in results[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--give", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.give is not None:
        uvloop.run(give_raw(options.give))
    else:
        print(json.dumps(measure(options.gigabytes, options.runs), indent=1))


if __name__ == "__main__":
    main()
