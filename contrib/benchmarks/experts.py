"""Mixtures of experts in packed formats beside llama.cpp, by the package xllamacpp: same file, same threads, same run. Prints JSON.

    python contrib/benchmarks/experts.py [--mixtures many large] [--forms Q4_0 Q4_K] [--threads 1 2] [--rounds 3]

    decode     a step of one session, and of eight, with all experts in memory.
    prompt     a prompt of 512 tokens.

`many` has 64 experts of inner size 256, of which a token uses 8; `large` has 32 of 1,024, of which it uses 4. Both are random, with
a hidden size of 1,024. Every contestant is a process. They take turns: llama.cpp, one graph of ggml, and the loop of products that
served mixtures before. Figures are medians, and ratios are medians of the turns' ratios: above 1, the graph is faster. `by_cpu`
compares seconds of CPU, for a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from packed import LONG_PROMPT, SESSIONS, Contestant, packed_folder, random_rows

HIDDEN, LAYERS, VOCABULARY, HEADS, KEY_HEADS = 1024, 8, 4096, 16, 4


@dataclass(frozen=True)
class Mixture:
    """Sizes of a layer's experts."""

    experts: int
    inner: int
    used: int


MIXTURES = {"many": Mixture(64, 256, 8), "large": Mixture(32, 1024, 4)}


def write_mixture(path: Path, mixture: Mixture, form: str, *, layers: int = LAYERS) -> None:
    """Write a random model of the family Qwen3 MoE whose matrices are in `form`; its routers are in F32."""
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(mixture.inner)
    writer.add_expert_feed_forward_length(mixture.inner)
    writer.add_expert_count(mixture.experts)
    writer.add_expert_used_count(mixture.used)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    width = HIDDEN // HEADS
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [*map(chr, printable), *(chr(256 + number) for number in range(256 - len(printable))), "wo"]
    writer.add_token_list([*letters, *(f"word{number}" for number in range(len(letters), VOCABULARY))])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["w o"])
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN)}
    vectors = {"output_norm": HIDDEN}
    for number in range(layers):
        block = f"blk.{number}"
        narrow = width * KEY_HEADS
        shapes |= {f"{block}.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "output")}
        shapes |= {f"{block}.attn_{name}": (narrow, HIDDEN) for name in ("k", "v")}
        shapes |= {f"{block}.ffn_{name}_exps": (mixture.experts, mixture.inner, HIDDEN) for name in ("gate", "up")}
        shapes[f"{block}.ffn_down_exps"] = (mixture.experts, HIDDEN, mixture.inner)
        vectors |= {f"{block}.{name}": HIDDEN for name in ("attn_norm", "ffn_norm")}
        vectors |= {f"{block}.attn_{name}_norm": width for name in ("q", "k")}
        router = np.random.default_rng(number).normal(0, 0.05, (mixture.experts, HIDDEN)).astype(np.float32)
        writer.add_tensor(f"{block}.ffn_gate_inp.weight", router)
    for name, size in vectors.items():
        writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))
    for seed, (name, shape) in enumerate(shapes.items()):
        rows = random_rows(form, int(np.prod(shape[:-1])), shape[-1], seed=seed)
        kind = gguf.GGMLQuantizationType[form]
        writer.add_tensor(f"{name}.weight", rows.reshape(*shape[:-1], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def beside(
    contestants: dict[str, Contestant], work: Callable[[Contestant], dict[str, float]], tokens: int, rounds: int
) -> dict[str, float]:
    """Let all do the same work in turns. Returns the tokens per second of each, and the ratios of the graph to the others."""
    for each in contestants.values():
        work(each)
    turns = [{name: work(each) for name, each in contestants.items()} for _ in range(rounds)]
    found = {
        f"{name}_tokens_per_s": round(tokens / statistics.median(turn[name]["wall"] for turn in turns), 1)
        for name in contestants
    }
    for other in contestants.keys() - {"graph"}:
        for clock, end in (("wall", ""), ("cpu", "_by_cpu")):
            ratio = statistics.median(turn[other][clock] / turn["graph"][clock] for turn in turns)
            found[f"of_{other}{end}"] = round(ratio, 3)
    return found


def in_memory(file: Path, folder: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Measure decoding and a prompt with all experts in memory."""
    ours = {"folder": str(packed_folder(file, folder)), "products": "fast", "dtype": "float32", "threads": threads}
    works: dict[str, tuple[Callable[[Contestant], dict[str, float]], int]] = {
        "decode": (lambda each: each.decode(1), 1),
        "decode of eight": (lambda each: each.decode(SESSIONS), SESSIONS),
        "prompt": (lambda each: each.generate(1, LONG_PROMPT, 1), LONG_PROMPT),
    }
    with ExitStack() as stack:
        contestants = {
            name: stack.enter_context(Contestant(VOCABULARY, **settings))
            for name, settings in (
                ("llama_cpp", {"file": str(file), "slots": SESSIONS, "threads": threads}),
                ("graph", ours),
                ("loop", {**ours, "is_loop": True}),
            )
        }
        return {name: beside(contestants, *work, rounds) for name, work in works.items()}


def main() -> None:
    """Measure the mixtures that are asked for, and print the figures of each as a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixtures", nargs="+", choices=MIXTURES, default=list(MIXTURES))
    parser.add_argument("--forms", nargs="+", choices=("Q4_0", "Q4_1", "Q4_K"), default=["Q4_0", "Q4_K"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        for mixture in options.mixtures:
            for form in options.forms:
                file = Path(name) / f"{mixture}-{form}.gguf"
                write_mixture(file, MIXTURES[mixture], form)
                for threads in options.threads:
                    found = in_memory(file, Path(name), threads, options.rounds)
                    print(json.dumps({f"{mixture}, {form}, {threads} threads": found}), flush=True)


if __name__ == "__main__":
    main()
