"""KV caches in 8 bits beside plain ones: sessions that fit, CPU seconds of a decode step, and perplexity. Prints JSON.

    OMP_NUM_THREADS=1 python contrib/benchmarks/kv_cache.py [sessions steps quality] [--models smollm2 gemma3] [--tokens 2500]

    sessions   sessions of 4,096 positions over all layers that a budget of 4 GB admits, for each dtype and form.
    steps      CPU seconds of a decode step behind contexts of 128 to 2,048 tokens; steps of both forms take turns.
    quality    perplexity of this repository's pages in windows of 512 tokens, each window as one prompt; and the share of positions
               with the plain cache's most probable token.

The models are GGUF files whose weights stay packed and multiply exactly, so only the caches differ.
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

import torch
from packed import WINDOW, file_of, packed_folder, predicted, windows_of

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.cache import CachePool
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.config import KV_FORMS

BUDGET_BYTES, CACHE_BYTES, POSITIONS = 4 << 30, 1 << 30, 4096
CONTEXTS, PAIRS = (128, 512, 2048), 24


def span_of(folder: Path, dtype: torch.dtype, products: str) -> ModelSpan:
    """Load all layers of a packed folder."""
    checkpoint = Checkpoint(folder)
    return load_span(checkpoint, 0, checkpoint.units, dtype=dtype, products=products)


def sessions(folder: Path, _options: argparse.Namespace) -> dict[str, Any]:
    """Count the sessions that a budget admits."""
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        span = span_of(folder, dtype, "plain")
        layers = span.layers_of(span.start, span.end)
        for kv in KV_FORMS:
            size_bytes = CachePool(span, BUDGET_BYTES, kv=kv).bytes_of(layers, 1, POSITIONS)
            found[f"{dtype}".removeprefix("torch.") + f" {kv}"] = BUDGET_BYTES // size_bytes
    return found | {"int8_of_bfloat16": round(found["bfloat16 int8"] / found["bfloat16 plain"], 3)}


@torch.inference_mode()
def steps(folder: Path, _options: argparse.Namespace) -> dict[str, Any]:
    """Time decode steps of both forms in turns."""
    span = span_of(folder, torch.float32, "exact")
    runners = {kv: StageRunner(span, RunnerConfig(CACHE_BYTES, kv=kv)) for kv in KV_FORMS}
    found = {}
    for context in CONTEXTS:
        ids_BT = torch.arange(100, 100 + context)[None] % span.vocab_size
        took_s: dict[str, list[float]] = {kv: [] for kv in KV_FORMS}
        for runner in runners.values():
            runner.open(0, rows=1, max_length=context + PAIRS)
            runner.run([StepInput(0, ids_BT)])
        for _ in range(PAIRS):
            for kv, runner in runners.items():
                began_s = time.thread_time()
                runner.run([StepInput(0, ids_BT[:, :1])])
                took_s[kv].append(time.thread_time() - began_s)
        for runner in runners.values():
            runner.close(0)
        plain_s, int8_s = (statistics.median(took_s[kv]) for kv in KV_FORMS)
        ratio = statistics.median(int8 / plain for plain, int8 in zip(*took_s.values(), strict=True))
        found[f"behind {context}"] = {
            "plain_ms": round(1000 * plain_s, 2),
            "int8_ms": round(1000 * int8_s, 2),
            "ratio": round(ratio, 3),
        }
    return found


@torch.inference_mode()
def quality(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure how well both forms predict the documentation."""
    span = span_of(folder, torch.float32, "exact")
    runners = {kv: StageRunner(span, RunnerConfig(CACHE_BYTES, kv=kv)) for kv in KV_FORMS}
    windows = windows_of(folder, options.tokens)
    return predicted(runners, windows, WINDOW) | {"tokens": sum(len(each) - 1 for each in windows)}


PARTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    part.__name__: part for part in (sessions, steps, quality)
}


def main() -> None:
    """Measure the parts that are asked for, and print the figures of each as a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*PARTS, []], help=", ".join(PARTS))
    parser.add_argument("--models", nargs="+", choices=("smollm2", "gemma3"), default=["smollm2", "gemma3"])
    parser.add_argument("--tokens", type=int, default=2500, help="tokens of `quality`")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        for part in options.parts or PARTS:
            for model in options.models:
                found = PARTS[part](packed_folder(file_of(model, Path(name)), Path(name)), options)
                print(json.dumps({part: {model: found}}), flush=True)


if __name__ == "__main__":
    main()
