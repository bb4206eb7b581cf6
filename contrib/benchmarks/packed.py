"""Packed weights of GGUF files beside llama.cpp, by the package xllamacpp: same file, same threads, same run. Prints JSON.

    python contrib/benchmarks/packed.py [PART …] [--models smollm2 gemma3 llama] [--rounds 3]

    founding   found a swarm from the file, packed and with `--plain`: seconds, and bytes on the disk / the file.
    memory     (PSS after loading and a prompt of 512 tokens - PSS before) / the packed bytes.
    single     decoding of one session, and a prompt of 512 tokens, without a network, for each kind of products.
    eight      decoding of eight sessions together, without a network, beside llama.cpp with eight slots.
    nodes      eight sessions over two nodes beside llama.cpp with two threads and eight slots; bytes that each node fetched.
    crowded    times between tokens of a session while one node computes another's prompt of 2,000 tokens: their 99th percentile
               / the median alone.
    avx2       tokens of a few texts over two nodes that change if the second one is held to AVX2.
    matrix     products of one matrix with 1 to 32 rows beside the fastest plain format of this machine.
    quality    perplexity of this repository's documentation, and the same most probable token, beside plain float32; also
               the same most probable token of llama.cpp.

Every contestant is a process with one thread, or with `--threads`; with several, time counts, and CPU does not. Contestants take
turns with llama.cpp in pairs; figures are medians, and ratios are medians of the pairs' ratios: above 1, ours is faster.
`by_cpu` compares seconds of CPU instead of time, for a busy machine.
`llama` is random: 1.1 B parameters in Q4_0, written to a temporary folder first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import operator
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import torch
import uvloop
from plain_decoding import PlainClient, joined
from real_sizes import READY_TIMEOUT_S, halves, together
from torch import Tensor, nn
from weights import Cpu

from swarmnode.compute.gguf.gguf import GgufCheckpoint
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.linear import speed_up_linears
from swarmnode.compute.packing.ggml import FORMATS, dequantise
from swarmnode.compute.packing.ggml_matrix import GgmlMatrix
from swarmnode.compute.serving.loading import check_family, load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.localswarm import LocalSwarm
from tests.trained import GEMMA3, SMOLLM2, trained

PROMPT, NEW, LONG_PROMPT, CROWDING, SESSIONS = 16, 48, 512, 2000, 8
RESTING_S = 0.05
TEXTS, HELD_TO_AVX2 = 4, ("ATEN_CPU_CAPABILITY=avx2", "MKL_ENABLE_INSTRUCTIONS=AVX2", "ONEDNN_MAX_CPU_ISA=AVX2")
KINDS = {
    "exact": ("exact", "float32"),
    "fast": ("fast", "float32"),
    "plain float32": ("plain", "float32"),
    "plain bfloat16": ("plain", "bfloat16"),
}
"""Kinds of products, each with its number format"""

MATRIX, MATRIX_ROWS, MATRIX_FORMATS = (5632, 2048), (1, 2, 4, 8, 16, 32), ("Q4_0", "Q4_1", "Q4_K")
WINDOW, FEW = 512, 8  # tokens of a text, and of a pass, whose perplexity is measured
CONTEXT, CACHE_BYTES = 640, 1 << 30


# -- models


def write_llama(
    path: Path, *, layers: int = 22, hidden: int = 2048, inner: int = 5632, vocabulary: int = 32000
) -> None:
    """Write a random Llama whose matrices are in Q4_0; 32 heads of queries and 4 of keys."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(32)
    writer.add_head_count_kv(4)
    writer.add_rope_dimension_count(hidden // 32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [*map(chr, printable), *(chr(256 + number) for number in range(256 - len(printable)))]
    tokens = [*letters, "wo"]
    writer.add_token_list([*tokens, *(f"word{number}" for number in range(len(tokens), vocabulary))])
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges(["w o"])
    narrow = hidden // 8
    matrices = {"token_embd": (vocabulary, hidden), "output": (vocabulary, hidden)}
    vectors = ["output_norm"]
    for number in range(layers):
        block = f"blk.{number}"
        matrices |= {f"{block}.attn_{name}": (hidden, hidden) for name in ("q", "output")}
        matrices |= {f"{block}.attn_{name}": (narrow, hidden) for name in ("k", "v")}
        matrices |= {f"{block}.ffn_{name}": (inner, hidden) for name in ("gate", "up")}
        matrices[f"{block}.ffn_down"] = (hidden, inner)
        vectors += [f"{block}.attn_norm", f"{block}.ffn_norm"]
    for name in vectors:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, dtype=np.float32))
    for number, (name, shape) in enumerate(matrices.items()):
        packed = random_rows("Q4_0", *shape, seed=number)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_rows(form: str, outputs: int, inputs: int, *, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return packed rows (outputs, bytes) with random weights of about 0.02, in a format whose blocks begin with their scales."""
    kind = FORMATS[form]
    rows = np.random.default_rng(seed).integers(0, 256, (outputs, kind.row_bytes(inputs)), dtype=np.uint8)
    blocks = rows.reshape(-1, kind.block_bytes)
    scale = 0.004 if form != "Q4_K" else 0.0001
    scales = np.array([scale] if form == "Q4_0" else [scale, -8 * scale if form == "Q4_1" else 8 * scale])
    blocks[:, : 2 * len(scales)] = scales.astype(np.float16).view(np.uint8)
    return rows


def file_of(model: str, folder: Path) -> Path:
    """Return the GGUF file of a model, which is fetched or written if it is not there."""
    if model == "llama":
        made = folder / "llama.gguf"
        if not made.exists():
            write_llama(made)
        return made
    return trained(SMOLLM2 if model == "smollm2" else GEMMA3)


def packed_folder(file: Path, folder: Path) -> Path:
    """Return the folder with the index of a file; `folder` is the benchmark's."""
    out = folder / f"packed-{file.stem}"
    if not out.exists():
        out.mkdir()
        GgufCheckpoint(file).pack(out)
    return out


def packed_bytes(checkpoint: Checkpoint, start: int, end: int) -> int:
    """Return the bytes of the packed tensors of units [start, end)."""
    entries = (checkpoint.entries[name] for name in checkpoint.tensors_of(start, end))
    return sum(entry.nbytes for entry in entries if entry.is_packed)


# -- contestants


class Subject(Protocol):
    """A model that generates."""

    def generate(self, prompts: list[list[int]], new: int) -> None:
        """Continue all prompts together, by `new` tokens each."""


class Ours:
    """Span of the whole model in this process. `is_loop`: experts in a loop of products, and no graph of ggml."""

    def __init__(self, folder: str, products: str, dtype: str, threads: int = 1, *, is_loop: bool = False) -> None:
        torch.set_num_threads(threads)
        checkpoint = Checkpoint(folder)
        check_family(checkpoint.family)
        gc.collect()
        self.before_bytes = pss_bytes()
        span = load_span(checkpoint, 0, checkpoint.units, dtype=getattr(torch, dtype), products=products)
        span.packings.at_once.run()
        self._runner = StageRunner(span, RunnerConfig(cache_bytes=CACHE_BYTES))
        if is_loop:
            self._runner.graphs, span.config._experts_implementation = None, "eager"

    def generate(self, prompts: list[list[int]], new: int) -> None:
        """Continue all prompts together, by `new` tokens each."""
        for session in range(len(prompts)):
            self._runner.open(session, rows=1, max_length=CONTEXT)
        inputs = [torch.tensor([prompt]) for prompt in prompts]
        for _ in range(new):
            results = self._runner.run([StepInput(session, x) for session, x in enumerate(inputs)])
            inputs = [result.output.argmax(dim=-1) for result in results]
        for session in range(len(prompts)):
            self._runner.close(session)


class LlamaCpp:
    """llama.cpp's server in this process, without HTTP."""

    def __init__(self, file: str, slots: int, threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = file
        params.n_parallel, params.n_ctx = slots, slots * CONTEXT
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.before_bytes = pss_bytes()
        self._server = xllamacpp.Server(params)
        self._pool = ThreadPoolExecutor(slots)

    def generate(self, prompts: list[list[int]], new: int) -> None:
        """Continue all prompts together, by `new` tokens each."""
        list(self._pool.map(lambda prompt: self._continue(prompt, new), prompts))

    def most_probable(self, window: list[int]) -> list[int]:
        """Return the most probable token behind each token of a window but the last, computed one after another."""
        asked = {"n_predict": 1, "temperature": 0, "ignore_eos": True, "cache_prompt": True, "logprobs": 1}
        answers = (
            self._server.handle_completions({**asked, "prompt": window[:length]}) for length in range(1, len(window))
        )
        return [answer["choices"][0]["logprobs"]["content"][0]["id"] for answer in answers]

    def _continue(self, prompt: list[int], new: int) -> None:
        asked = {"prompt": prompt, "n_predict": new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        answer = self._server.handle_completions(asked)
        assert answer["usage"] == {**answer["usage"], "prompt_tokens": len(prompt), "completion_tokens": new}


def pss_bytes() -> int:
    """Return this process's share of the memory that it uses."""
    return int(psutil.Process().memory_full_info().pss)


def rest() -> None:
    """Wait until no thread of this process runs, since some look for work a while longer, in the turn of another contestant."""
    used_s = -1.0
    while time.process_time() - used_s > RESTING_S / 10:
        used_s = time.process_time()
        time.sleep(RESTING_S)


def compete(settings: dict[str, Any]) -> None:
    """Answer requests, one a line, with time and CPU seconds of each."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    subject = LlamaCpp(**settings) if "slots" in settings else Ours(**settings)
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        began_s, cpu_s = time.perf_counter(), time.process_time()
        subject.generate(**json.loads(line))
        told = {"wall": time.perf_counter() - began_s, "cpu": time.process_time() - cpu_s}
        rest()
        print(json.dumps({**told, "grown_bytes": pss_bytes() - subject.before_bytes}), file=out, flush=True)


class Contestant:
    """Process of a contestant: `with Contestant(...) as ours: ours.generate(...)`."""

    def __init__(self, vocabulary: int, **settings: Any) -> None:
        self._vocabulary = vocabulary
        command = [sys.executable, __file__, "--compete", json.dumps(settings)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._read()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))

    def generate(self, sessions: int, prompt: int, new: int) -> dict[str, float]:
        """Continue the prompts of some sessions together. Returns the seconds that it took, of the clock and of CPU."""
        prompts = [prompt_of(self._vocabulary, prompt, number) for number in range(sessions)]
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "new": new}), file=self._process.stdin, flush=True)
        return self._read()

    def decode(self, sessions: int) -> dict[str, float]:
        """Return the seconds of a step of some sessions together, of the clock and of CPU."""
        first, all_of_it = self.generate(sessions, PROMPT, 1), self.generate(sessions, PROMPT, NEW)
        return {clock: (all_of_it[clock] - first[clock]) / (NEW - 1) for clock in ("wall", "cpu")}


def prompt_of(vocabulary: int, length: int, number: int) -> list[int]:
    """Return token ids that differ by `number`."""
    return [100 + (7 * position + 13 * number) % (vocabulary - 200) for position in range(length)]


Work = Callable[[Contestant], dict[str, float]]


def beside(theirs: Contestant, ours: Contestant, work: Work, tokens: int, rounds: int) -> dict[str, float]:
    """Let both do the same work in turns. Returns tokens per second of both, and the ratios of ours to theirs."""
    work(ours)
    pairs = [(work(theirs), work(ours)) for _ in range(rounds)]

    def ratio(clock: str) -> float:
        return round(statistics.median(their[clock] / our[clock] for their, our in pairs), 3)

    return {
        "tokens_per_s": round(tokens / statistics.median(our["wall"] for _, our in pairs), 1),
        "llama_cpp_tokens_per_s": round(tokens / statistics.median(their["wall"] for their, _ in pairs), 1),
        "of_llama_cpp": ratio("wall"),
        "of_llama_cpp_by_cpu": ratio("cpu"),
    }


@contextlib.contextmanager
def contestants(
    file: Path, folder: Path, slots: int, options: argparse.Namespace
) -> Iterator[tuple[Contestant, Iterator[tuple[str, Contestant]]]]:
    """Yield llama.cpp, and the wanted kinds of ours, one after another."""
    packed = packed_folder(file, folder)
    vocabulary = Checkpoint(packed).config.vocab_size

    def ours() -> Iterator[tuple[str, Contestant]]:
        for kind in options.kinds:
            products, dtype = KINDS[kind]
            settings = {"products": products, "dtype": dtype, "threads": options.threads}
            with Contestant(vocabulary, folder=str(packed), **settings) as contestant:
                yield kind, contestant

    with Contestant(vocabulary, file=str(file), slots=slots, threads=options.threads) as theirs:
        theirs.generate(slots, PROMPT, 4)
        yield theirs, ours()


# -- parts


def single(file: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure decoding of one session, and a long prompt."""
    works: dict[str, tuple[Work, int]] = {
        "decode": (lambda each: each.decode(1), 1),
        "prompt": (lambda each: each.generate(1, LONG_PROMPT, 1), LONG_PROMPT),
    }
    with contestants(file, folder, 1, options) as (theirs, ours):
        return {
            kind: {name: beside(theirs, each, *work, options.rounds) for name, work in works.items()}
            for kind, each in ours
        }


def eight(file: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure decoding of eight sessions together."""
    with contestants(file, folder, SESSIONS, options) as (theirs, ours):
        return {
            kind: beside(theirs, each, lambda each: each.decode(SESSIONS), SESSIONS, options.rounds)
            for kind, each in ours
        }


def memory(file: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure by how much the process grows."""
    checkpoint = Checkpoint(packed_folder(file, folder))
    packed = packed_bytes(checkpoint, 0, checkpoint.units)
    found: dict[str, Any] = {"packed_mb": round(packed / 1e6, 1)}
    with contestants(file, folder, 1, options) as (theirs, ours):
        for kind, each in itertools.chain([("llama.cpp", theirs)], ours):
            grown = each.generate(1, LONG_PROMPT, 1)["grown_bytes"]
            found[kind] = {"grown_mb": round(grown / 1e6, 1), "of_packed": round(grown / packed, 3)}
    return found


def founding(file: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Found swarms from the file."""
    found: dict[str, list[dict[str, float]]] = {"packed": [], "plain": []}
    for number in range(options.rounds):
        for kind, results in found.items():
            place = folder / f"founded-{file.stem}-{kind}{number}"
            place.mkdir()
            cpu_s, began_s = _children_cpu_s(), time.perf_counter()
            LocalSwarm(place).create(file, *(["--plain"] if kind == "plain" else []))
            took_s, cpu_s = time.perf_counter() - began_s, _children_cpu_s() - cpu_s
            written = sum(each.stat().st_size for each in place.rglob("*") if each.is_file() and not each.is_symlink())
            disk = (written + file.stat().st_size) / file.stat().st_size
            results.append({"s": took_s, "cpu_s": cpu_s, "disk_of_file": disk})
    return {kind: medians(results) for kind, results in found.items()}


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def medians(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: round(statistics.median(result[name] for result in results), 3) for name in results[0]}


def nodes(file: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Serve the file by two nodes that come with an invite."""
    checkpoint = Checkpoint(packed_folder(file, folder))
    spans, vocabulary = halves(checkpoint.units), checkpoint.config.vocab_size
    return {
        kind: _over_two_nodes(file, folder / f"nodes-{file.stem}-{kind}", checkpoint, spans, vocabulary, kind, options)
        for kind in ("exact", "fast")
        if kind in options.kinds
    }


def _over_two_nodes(
    file: Path,
    folder: Path,
    checkpoint: Checkpoint,
    spans: list[str],
    vocabulary: int,
    products: str,
    options: argparse.Namespace,
) -> dict[str, Any]:
    folder.mkdir()
    with (
        Contestant(vocabulary, file=str(file), slots=SESSIONS, threads=2) as theirs,
        LocalSwarm(folder) as swarm,
    ):
        invite = swarm.create(file)
        swarm.bootstrap()
        members = [
            swarm.node(f"n{number}", "--span", span, "--products", products, swarm=invite)
            for number, span in enumerate(spans)
        ]
        for member in members:
            member.wait_for("ready", READY_TIMEOUT_S)
        fetched = [max(event.get("total_bytes", 0) for event in member.seen) for member in members]
        needed = [packed_bytes(checkpoint, *map(int, span.split(":"))) for span in spans]

        async def live() -> list[dict[str, float]]:
            client = await joined(swarm, len(members))
            try:
                await _decode(client, vocabulary, [member.pid for member in members])
                turns = []
                for _ in range(options.rounds):
                    llama = await asyncio.to_thread(theirs.decode, SESSIONS)
                    ours = await _decode(client, vocabulary, [member.pid for member in members])
                    turns.append(
                        {
                            "tokens_per_s": SESSIONS / ours["wall"],
                            "llama_cpp_tokens_per_s": SESSIONS / llama["wall"],
                            "of_llama_cpp": llama["wall"] / ours["wall"],
                            "of_llama_cpp_by_cpu_of_nodes": llama["cpu"] / ours["cpu"],
                        }
                    )
                return turns
            finally:
                await client.close()

        theirs.generate(SESSIONS, PROMPT, 4)
        return {
            **medians(uvloop.run(live())),
            "fetched_of_packed": [round(ours / least, 3) for ours, least in zip(fetched, needed, strict=True)],
        }


async def _decode(client: PlainClient, vocabulary: int, pids: list[int]) -> dict[str, float]:
    """Return the seconds of a step of eight sessions over the nodes, as `Contestant.decode`."""
    prompts = [prompt_of(vocabulary, PROMPT, number) for number in range(SESSIONS)]
    took: list[dict[str, float]] = []
    for new in (1, NEW):
        cpu, began_s = Cpu(pids), time.perf_counter()
        await together(client, prompts, new)
        took.append({"wall": time.perf_counter() - began_s, "cpu": sum(cpu.spent().values())})
    return {clock: (took[1][clock] - took[0][clock]) / (NEW - 1) for clock in took[0]}


def crowded(file: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure how long a session waits for its tokens while one node computes another's prompt of `CROWDING` tokens."""
    units = Checkpoint(packed_folder(file, folder)).units
    found: dict[str, Any] = {}
    for kind in [kind for kind in ("exact", "fast") if kind in options.kinds]:
        (place := folder / f"crowded-{file.stem}-{kind}").mkdir()
        with LocalSwarm(place) as swarm:
            invite = swarm.create(file)
            swarm.bootstrap()
            swarm.node("n", "--span", f"0:{units}", "--products", kind, swarm=invite).wait_for("ready", READY_TIMEOUT_S)
            found[kind] = uvloop.run(_beside_a_prompt(swarm))
    return found


async def _beside_a_prompt(swarm: LocalSwarm) -> dict[str, float]:
    client = await joined(swarm, 1)
    gaps: dict[str, list[float]] = {"alone": [], "beside": []}
    prompt_s: list[float] = []

    async def ask() -> None:
        began_s = time.perf_counter()
        await client.generate(prompt_of(4096, CROWDING, 1), max_new_tokens=1)
        prompt_s.append(time.perf_counter() - began_s)

    try:
        stream = await client.stream(prompt_of(4096, PROMPT, 2), max_new_tokens=CROWDING, ignore_ends=True)
        last_s, asking = None, None
        async with contextlib.aclosing(aiter(stream)) as tokens:
            async for _ in tokens:
                now_s = time.perf_counter()
                if last_s is not None:
                    gaps["alone" if asking is None else "beside"].append(now_s - last_s)
                last_s = now_s
                if asking is None and len(gaps["alone"]) == 4 * NEW:
                    asking = asyncio.create_task(ask())
                elif asking is not None and asking.done():
                    break
    finally:
        await client.close()
    alone_s, beside = statistics.median(gaps["alone"][NEW:]), sorted(gaps["beside"])
    p99_s = beside[int(0.99 * len(beside))]
    return {
        "alone_ms": round(1e3 * alone_s, 2), "p99_beside_ms": round(1e3 * p99_s, 2), "tokens_beside": len(beside),
        "p99_of_alone": round(p99_s / alone_s, 2), "prompt_s": round(prompt_s[0], 2),
    }  # fmt: skip


def avx2(file: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Count the tokens that two nodes write otherwise if the second one is held to AVX2, and the texts in which they lie."""
    spans = halves(Checkpoint(packed_folder(file, folder)).units)
    found: dict[str, Any] = {}
    for kind in [kind for kind in ("exact", "fast") if kind in options.kinds]:
        texts: list[list[list[int]]] = []
        for number, inside in enumerate(((), ("env", *HELD_TO_AVX2))):
            (place := folder / f"avx2-{file.stem}-{kind}{number}").mkdir()
            with LocalSwarm(place) as swarm:
                invite = swarm.create(file)
                swarm.bootstrap()
                arguments = [("--span", span, "--products", kind) for span in spans]
                members = [swarm.node("n0", *arguments[0], swarm=invite)]
                members.append(swarm.node("n1", *arguments[1], swarm=invite, inside=inside))
                for member in members:
                    member.wait_for("ready", READY_TIMEOUT_S)
                texts.append(uvloop.run(_texts(swarm)))
        different = [sum(map(operator.ne, *pair)) for pair in zip(*texts, strict=True)]
        found[kind] = {"tokens": TEXTS * NEW, "different": sum(different), "texts": sum(map(bool, different))}
    return found


async def _texts(swarm: LocalSwarm) -> list[list[int]]:
    client = await joined(swarm, 2)
    try:
        texts = []
        for number in range(TEXTS):
            stream = await client.stream(prompt_of(4096, PROMPT, number), max_new_tokens=NEW, ignore_ends=True)
            async for _ in stream:
                pass
            texts.append(stream.result.ids)
        return texts
    finally:
        await client.close()


@torch.inference_mode()
def matrix(options: argparse.Namespace) -> dict[str, Any]:
    """Multiply one matrix with few rows: microseconds by number of rows, and the fastest plain time / that of a kind."""
    outputs, inputs = MATRIX
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    for form in MATRIX_FORMATS:
        packed_OB = torch.from_numpy(random_rows(form, outputs, inputs))
        weight_OI = dequantise(packed_OB.view(-1), FORMATS[form], outputs * inputs).view(outputs, inputs)
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            kind: GgmlMatrix(packed_OB, FORMATS[form], inputs, exact=kind == "exact").multiply
            for kind in ("exact", "fast")
        }
        ways |= {f"plain {name}": _plain(weight_OI, getattr(torch, name)) for name in ("float32", "bfloat16")}
        report[form] = {rows: _beside_plain(ways, rows, options.rounds) for rows in MATRIX_ROWS}
    return report


def _plain(weight_OI: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the product with a plain matrix, in the way that a node chooses on this machine."""
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, dtype=dtype)
    linear.weight.data.copy_(weight_OI)
    model = nn.Sequential(linear)
    speed_up_linears(model).at_once.run()
    return lambda x_RI: model(x_RI.to(dtype))  # type: ignore[no-any-return]


def _beside_plain(ways: dict[str, Callable[[Tensor], Tensor]], rows: int, rounds: int) -> dict[str, Any]:
    took: dict[str, list[float]] = {name: [] for name in ways}
    generator = torch.Generator().manual_seed(rows)
    for _ in range(10 * rounds):
        x_RI = torch.randn(rows, MATRIX[1], generator=generator)  # a new one: exact products keep the parts of the last
        for name, multiply in ways.items():
            began_s = time.thread_time()
            multiply(x_RI)
            took[name].append(time.thread_time() - began_s)
    us = {name: round(1e6 * statistics.median(times)) for name, times in took.items()}
    plain_us = min(value for name, value in us.items() if name.startswith("plain"))
    return {"cpu_us": us, **{f"{kind}_of_plain": round(plain_us / us[kind], 2) for kind in ("exact", "fast")}}


@torch.inference_mode()
def quality(file: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure how well each kind predicts the documentation: in passes of few positions, and of a window's."""
    torch.set_num_threads(1)
    packed = packed_folder(file, folder)
    windows = windows_of(packed, options.tokens)
    checkpoint = Checkpoint(packed)
    chosen = {kind: KINDS[kind] for kind in dict.fromkeys(("plain float32", *options.kinds))}
    runners: dict[str, StageRunner] = {}
    for kind, (products, dtype) in chosen.items():
        span = load_span(checkpoint, 0, checkpoint.units, dtype=getattr(torch, dtype), products=products)
        runners[kind] = StageRunner(span, RunnerConfig(cache_bytes=CACHE_BYTES))
    theirs = LlamaCpp(str(file), 1, 1)
    same = torch.tensor([top for window in windows for top in theirs.most_probable(window)])
    return {
        f"passes of {step}": predicted(runners, windows, step, same) | {"tokens": len(same)} for step in (FEW, WINDOW)
    }


def windows_of(packed: Path, tokens: int) -> list[list[int]]:
    """Return the documentation's first `tokens` tokens in windows of `WINDOW`, with the tokenizer of a packed folder."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(packed / "tokenizer.json"))
    first = tokenizer.encode("").ids
    text = "\n\n".join(page.read_text() for page in sorted(Path(__file__).parents[2].glob("docs/*.md")))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    size = WINDOW - len(first)
    return [first + ids[begin : begin + size] for begin in range(0, min(len(ids), tokens), size)]


def predicted(
    runners: dict[str, StageRunner], windows: list[list[int]], step: int, llama_cpp_N: Tensor
) -> dict[str, Any]:
    """Return the perplexity of each kind beside that of the first, and the share of positions with its most probable token, also
    of those that llama.cpp finds most probable."""
    losses: dict[str, list[Tensor]] = {kind: [] for kind in runners}
    tops: dict[str, list[Tensor]] = {kind: [] for kind in runners}
    for window in windows:
        for runner in runners.values():
            runner.open(0, rows=1, max_length=WINDOW)
        x_T, next_T = torch.tensor(window[:-1]), torch.tensor(window[1:])
        for begin in range(0, len(x_T), step):
            some_BT = x_T[None, begin : begin + step]
            for kind, runner in runners.items():
                logits_TV = runner.run([StepInput(0, some_BT, want=2)])[0].output[0].float()
                losses[kind].append(
                    nn.functional.cross_entropy(logits_TV, next_T[begin : begin + step], reduction="none")
                )
                tops[kind].append(logits_TV.argmax(dim=-1))
        for runner in runners.values():
            runner.close(0)
    truth = next(iter(runners))
    perplexity = {kind: float(torch.cat(loss).mean().exp()) for kind, loss in losses.items()}
    same = {kind: float((torch.cat(top) == torch.cat(tops[truth])).float().mean()) for kind, top in tops.items()}
    theirs = float((llama_cpp_N == torch.cat(tops[truth])).float().mean())
    return {"llama.cpp, single steps": {"same_top": round(theirs, 4)}} | {
        kind: {
            "perplexity": round(perplexity[kind], 4),
            "of_float32": round(perplexity[kind] / perplexity[truth], 5),
            "same_top": round(same[kind], 4),
        }
        for kind in runners
    }


PARTS: dict[str, Callable[[Path, Path, argparse.Namespace], dict[str, Any]]] = {
    part.__name__: part for part in (founding, memory, single, eight, nodes, crowded, avx2, quality)
}
MODELS = ("smollm2", "gemma3", "llama")


def main() -> None:
    """Measure the parts that are asked for, and print the figures of each as a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*PARTS, matrix.__name__]
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*names, []], help=", ".join(names))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS[:2])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of products")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of each contestant of `single`, `eight` and `memory`"
    )
    parser.add_argument("--tokens", type=int, default=2500, help="tokens of `quality`")
    parser.add_argument("--compete", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compete:
        compete(json.loads(options.compete))
        return
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        for part in options.parts or names:
            if part == matrix.__name__:
                print(json.dumps({part: matrix(options)}), flush=True)
                continue
            for model in options.models:
                found = PARTS[part](file_of(model, Path(name)), Path(name), options)
                print(json.dumps({part: {model: found}}), flush=True)


if __name__ == "__main__":
    main()
