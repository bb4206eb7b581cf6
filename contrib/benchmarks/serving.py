"""Serving speed against one local transformers process, in the same run: `python contrib/benchmarks/serving.py`.

Model: random Llama, hidden 512, 8 layers, 8 heads, vocabulary 32000, float32. One thread per process, no drafts
(`plain_decoding.py`). Prints one JSON object; every ratio is the median over the repeats of (ours / local measured next to it).
`…_by_cpu` divides local CPU seconds of a token by those of all nodes and their p2pds: for a machine that other programs use, too.
It leaves out the client and all waiting, so one stream over several nodes is slower than this ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from baseline import LocalProcess
from plain_decoding import PlainClient, joined
from weights import Cpu

from swarmnode.localswarm import LocalSwarm, NodeProcess

HIDDEN, LAYERS, HEADS, VOCABULARY = 512, 8, 8, 32000
PROMPT_TOKENS, NEW_TOKENS, PREFILL_TOKENS = 32, 64, 512
SESSIONS = 8
TCP_IP_HEADER_BYTES = 52  # IPv4 + TCP with timestamps


def make_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=1376,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def spans(nodes: int) -> list[str]:
    """Return even spans of the units over `nodes` nodes."""
    cuts = [round(number * (LAYERS + 2) / nodes) for number in range(nodes + 1)]
    return [f"{start}:{end}" for start, end in itertools.pairwise(cuts)]


def wire_bytes(pids: set[int]) -> tuple[int, int]:
    """Return the payload bytes and the segments that the open TCP connections of these processes have sent."""
    output = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout
    payload = segments = 0
    for line in output.splitlines():
        if any(f"pid={pid}," in line for pid in pids):
            payload += sum(map(int, re.findall(r"bytes_sent:(\d+)", line)))
            segments += sum(map(int, re.findall(r"[^_]segs_out:(\d+)", line)))
    return payload, segments


def children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def pss_bytes(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
        assert match is not None
        total += int(match[1]) * 1024
    return total


async def single_stream(
    client: PlainClient, members: list[NodeProcess], local: LocalProcess, repeats: int
) -> dict[str, Any]:
    """Measure decode speed of one session and the time of a long prompt, each beside one local process."""
    prompt, long = list(range(5, 5 + PROMPT_TOKENS)), list(range(5, 5 + PREFILL_TOKENS))
    await client.generate(prompt, max_new_tokens=8)
    decode, by_cpu, prefill, speeds = [], [], [], []
    for _ in range(repeats):
        alone = await asyncio.to_thread(local.measure)
        cpu = Cpu(member.pid for member in members)
        await client.generate(prompt, max_new_tokens=1)
        prompt_cpu_s = sum(cpu.spent().values())
        ours = await client.generate(prompt, max_new_tokens=NEW_TOKENS)
        cpu_s = (sum(cpu.spent().values()) - 2 * prompt_cpu_s) / (NEW_TOKENS - 1)
        first = await client.generate(long, max_new_tokens=1)
        decode.append(ours.tokens_per_s / alone["decode_tokens_per_s"])
        by_cpu.append(alone["decode_cpu_s"] / cpu_s)
        prefill.append(alone["prefill_s"] / first.first_token_s)
        speeds.append(ours.tokens_per_s)
    return {
        "decode_ratio": round(statistics.median(decode), 3),
        "decode_ratio_by_cpu": round(statistics.median(by_cpu), 3),
        "prefill_512_ratio": round(statistics.median(prefill), 3),
        "tokens_per_s": round(statistics.median(speeds), 1),
        "decode_ratios": [round(ratio, 3) for ratio in decode],
    }


async def concurrent(
    client: PlainClient, members: list[NodeProcess], local: LocalProcess, repeats: int
) -> dict[str, Any]:
    """Measure tokens/s of several sessions at once by wall clock and by CPU seconds, prompts included, against one local stream."""
    ratios, by_cpu = [], []
    for _ in range(repeats):
        alone = await asyncio.to_thread(local.measure)
        prompts = [list(range(5 + number, 5 + number + PROMPT_TOKENS)) for number in range(SESSIONS)]
        cpu, started_s = Cpu(member.pid for member in members), time.perf_counter()
        results = await asyncio.gather(*(client.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in prompts))
        seconds = time.perf_counter() - started_s
        tokens = sum(len(result.ids) for result in results)
        ratios.append(tokens / seconds / alone["decode_tokens_per_s"])
        by_cpu.append(tokens * alone["decode_cpu_s"] / sum(cpu.spent().values()))
    return {
        f"aggregate_{SESSIONS}_ratio": round(statistics.median(ratios), 3),
        f"aggregate_{SESSIONS}_ratio_by_cpu": round(statistics.median(by_cpu), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


async def bytes_per_token(client: PlainClient, members: list[NodeProcess]) -> dict[str, Any]:
    """Return the bytes that all p2pds send per decoded token: payloads alone, with TCP and IP headers, and payloads less what they
    send in as many seconds without work. On a busy machine a token takes longer, so that more of the latter falls on it."""
    pids = {pid for member in members for pid in children(member.pid)} | set(children(os.getpid()))
    tokens = 400
    prompt = list(range(5, 5 + PROMPT_TOKENS))
    stream = await client.stream(prompt, max_new_tokens=tokens + 20)
    number, before, after, took_s = 0, (0, 0), (0, 0), 0.0
    async for _ in stream:
        number += 1
        if number == 10:
            before, began_s = await asyncio.to_thread(wire_bytes, pids), time.perf_counter()
        elif number == 10 + tokens:
            after, took_s = await asyncio.to_thread(wire_bytes, pids), time.perf_counter() - began_s
    payload, segments = after[0] - before[0], after[1] - before[1]
    idle_from, _ = await asyncio.to_thread(wire_bytes, pids)
    await asyncio.sleep(took_s)
    idle = (await asyncio.to_thread(wire_bytes, pids))[0] - idle_from
    return {
        "payload_bytes": round(payload / tokens, 1),
        "payload_less_idle_bytes": round((payload - idle) / tokens, 1),
        "with_headers_bytes": round((payload + segments * TCP_IP_HEADER_BYTES) / tokens, 1),
        "floor_bytes": HIDDEN * 4 + 450,
    }


async def measure(model: Path, folder: Path, nodes: int, repeats: int, local: LocalProcess) -> dict[str, Any]:
    result: dict[str, Any] = {"nodes": nodes}
    with LocalSwarm(folder / f"swarm{nodes}") as swarm:
        swarm.folder.mkdir(exist_ok=True)
        swarm.create(model)
        swarm.bootstrap()
        members, starts = [], []
        for number, span in enumerate(spans(nodes)):
            started_s = time.perf_counter()
            member = swarm.node(f"n{number}", "--span", span)
            member.wait_for("ready")
            starts.append(time.perf_counter() - started_s)
            members.append(member)
        result["start_to_serving_s"] = round(statistics.median(starts), 2)
        client = await joined(swarm, nodes)
        try:
            result |= await single_stream(client, members, local, repeats)
            if nodes == 2:
                result |= await concurrent(client, members, local, repeats)
                result["wire"] = await bytes_per_token(client, members)
        finally:
            await client.close()
    return result


def memory_before_weights(folder: Path) -> dict[str, Any]:
    """Measure the memory (PSS) of all processes of a node that serves a model of almost no weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "none")
    with LocalSwarm(folder / "memory") as swarm:
        swarm.folder.mkdir()
        swarm.create(folder / "none")
        swarm.bootstrap()
        member = swarm.node("n")
        member.wait_for("ready")
        pids = [member.pid, *children(member.pid)]
        return {"pss_mib": round(pss_bytes(pids) / 2**20, 1), "processes": len(pids)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        report: dict[str, Any] = {"memory_before_weights": memory_before_weights(folder)}
        sizes = {"prompt": PROMPT_TOKENS, "new": NEW_TOKENS, "prefill": PREFILL_TOKENS}
        with LocalProcess(folder / "model", **sizes) as local:
            import uvloop

            for nodes in options.nodes:
                report[f"nodes_{nodes}"] = uvloop.run(measure(folder / "model", folder, nodes, options.repeats, local))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
