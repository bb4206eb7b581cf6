"""Speed, memory and exactness of the hot paths on a CUDA device. A line of JSON on standard output for each part.

    python contrib/benchmarks/gpu.py PART… [--device cuda:0] [--seconds 5] [--tiny]

    correct   tests/card on this device; a lost context in a process of its own.
    decode    layers of an 8 B shape, bfloat16 and float32: tokens/s by sessions and cached positions, share of memory's bandwidth.
              As it comes and captured, beside transformers' own model with the cache of its `generate`.
    prefill   tokens/s of prompts, share of the device's speed at products of large matrices.
    hop       a middle hop's decode pass from payloads to payloads, by codec and sessions, and the share of it that the model takes.
    memory    peak over what the ledger counts, for weights, caches and a pass.
    codecs    GB/s there and back; whether the payload equals the CPU's.
    train     tokens/s of forward and backward, and the share that is backward, with and without autocast.
    quantize  tokens/s and bytes of a span in int8 and NF4.
    packed    decoding and prompts of packed layers (random, Q4_0, Q4_K and Q6_K) beside plain ones, captured, in turns.
    experts   decoding by a packed mixture, in turns: all experts on the card; a quarter there and the others by the CPU; all by the
              CPU. Medians. Inputs are random, so that the fewest experts are found on the card.
    node      two nodes and a spare one, processes on this one device, with links between them: ms per token of one session and of
              eight, and the longest pause and the text after the second node of a route was killed with SIGKILL.
    text      the first token at which a generation differs: in a batch, and replayed in chunks, from itself alone.

`--tiny` takes small shapes and few of them, for a simulated device (`tests/card`) or a CPU. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain_decoding import PlainClient, joined
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from swarmnode.codec.messages import Truncate
from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode, encode
from swarmnode.compute.device import Device, probe_device
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.model.traced_model import CACHE_ARGUMENT
from swarmnode.compute.packing import card_matrix
from swarmnode.compute.packing.ggml import FORMATS
from swarmnode.compute.packing.packed_weight import held_by
from swarmnode.compute.serving.captured_decode import STEADY_STEPS
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_NOTHING, RunnerConfig, StageRunner, StepInput
from swarmnode.compute.stopwatch import synchronize
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.errors import SwarmnodeError
from swarmnode.localswarm import LocalSwarm, NodeProcess
from swarmnode.plan.compression import CodecSchedule
from swarmnode.serving.job import ForwardHidden, Job
from swarmnode.serving.worker import Worker
from swarmnode.swarm.records.run import Run
from swarmnode.swarm.storage.content import PACKED_NAME

ROOT = Path(__file__).parents[2]
LOST = "import torch; torch.zeros(3, device='{0}')[torch.tensor([7], device='{0}')]; torch.cuda.synchronize('{0}')"


SCALES = {"Q4_0": {0: 4e-3}, "Q8_0": {0: 2e-4}, "Q4_K": {0: 1e-4, 2: 8e-4}, "Q6_K": {208: 1e-5}}
"""float16 numbers of a format's blocks by their places, for weights of about 0.02"""

KILL_AT, TEXT, NODE_ROUNDS = 24, 64, 3  # tokens of a text, and those before the kill
PACKED_ROUNDS = 2
ROUTED_STEPS = 100


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, and the sessions and positions that it is measured with. `FULL` has the layers of an 8 B model, of
    a depth that fits into most cards in float32."""

    layers: int
    sizes: dict[str, int]
    sessions: tuple[int, ...]
    positions: tuple[int, ...]
    elements: int


FULL = Shape(
    layers=8,
    sizes={
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    sessions=(1, 8, 32),
    positions=(512, 4096),
    elements=1 << 24,
)
TINY = Shape(
    layers=2,
    sizes={
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    sessions=(1, 3),
    positions=(24,),
    elements=5000,
)


class Bench:
    """A device, a shape, and its checkpoint."""

    def __init__(self, device: Device, shape: Shape, folder: Path, figure_s: float = 0.1) -> None:
        self.device, self.use = device.torch_device, device.use
        self.shape, self.figure_s = shape, figure_s
        self.tiny = shape is TINY
        ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        torch.manual_seed(1)
        with self.device:  # a CPU takes most of a minute to draw these values
            LlamaForCausalLM(LlamaConfig(num_hidden_layers=shape.layers, **shape.sizes, **ends)).save_pretrained(folder)
        self.checkpoint = Checkpoint(folder)

    def span(self, dtype: torch.dtype, quantize: str = "none") -> ModelSpan:
        """Load the layers, without embedding and head."""
        last = self.shape.layers + 1
        return load_span(self.checkpoint, 1, last, device=self.device, dtype=dtype, quantize=quantize, check=False)

    def hidden(self, span: ModelSpan, rows: int, count: int) -> torch.Tensor:
        return torch.randn(rows, count, span.hidden_size, device=self.device).to(span.dtype)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of the fastest of the runs that fit into `figure_s`, after a warm-up run."""
        best_s, until_s = float("inf"), time.perf_counter() + self.figure_s
        work()
        while best_s == float("inf") or time.perf_counter() < until_s:
            synchronize(self.device)
            began_s = time.perf_counter()
            work()
            synchronize(self.device)
            best_s = min(best_s, time.perf_counter() - began_s)
        return best_s

    def runner(self, span: ModelSpan, sessions: int, positions: int, *, capture: bool = False) -> StageRunner:
        """Return a runner with `sessions` open sessions that hold `positions` positions each and have room for some more."""
        columns = positions + 600
        cache_bytes = 4 * sessions * columns * span.cache_bytes_per_token
        runner = StageRunner(span, RunnerConfig(cache_bytes, capture=capture))
        for session in range(sessions):
            runner.open(session, rows=1, max_length=columns)
            for begin in range(0, positions, 512):
                count = min(512, positions - begin)
                runner.run([StepInput(session, self.hidden(span, 1, count), WANT_NOTHING)])
        return runner


def correct(bench: Bench) -> Any:
    if bench.tiny:
        return {"skipped": "this is one of its tests, and a simulated device is of one process"}
    found = {"tests": _run([sys.executable, "-m", "pytest", "-n", "0", "-q", "tests/card"])}
    if bench.device.type == "cuda":
        found["lost context"] = _run([sys.executable, "-c", LOST.format(bench.device)])
    return found


def _run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)
    return {"exit code": done.returncode, "end": (done.stdout + done.stderr)[-600:]}


def decode_steps(bench: Bench) -> Any:
    copied = torch.empty(bench.shape.elements, device=bench.device)
    bandwidth = 2 * copied.nbytes / bench.seconds(copied.clone)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        span = bench.span(dtype)
        shapes = itertools.product(bench.shape.positions, bench.shape.sessions, (False, True))
        for positions, sessions, capture in shapes:
            runner = bench.runner(span, sessions, positions, capture=capture)
            step = _one_step(runner, bench.hidden(span, 1, 1), sessions)
            for _ in range(STEADY_STEPS):
                step()
            step_s = bench.seconds(step)
            read = span.weight_bytes + sessions * positions * span.cache_bytes_per_token
            figures = {"tokens_per_s": sessions / step_s, "of_bandwidth": read / step_s / bandwidth}
            how = {"captured": runner.captured is not None and runner.captured.replays > 0}
            found.append({"dtype": str(dtype), "positions": positions, "sessions": sessions, **how, **figures})
            runner.close_all(keep_span=True)
        span.close()
        found.append({"dtype": str(dtype), "transformers": _alone(bench, dtype)})
    return {"bandwidth_gb_per_s": bandwidth / 1e9, "steps": found}


def _one_step(runner: StageRunner, x: torch.Tensor, sessions: int) -> Callable[[], None]:
    """Return a function that computes a position of every session and truncates it again."""

    def step() -> None:
        runner.run([StepInput(session, x) for session in range(sessions)])
        for session in range(sessions):
            runner.truncate(session, runner.length(session) - 1)

    return step


def _alone(bench: Bench, dtype: torch.dtype) -> dict[str, float]:
    """Time transformers' own model of the same layers, with embedding and head, one session, with the cache of its `generate`."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model: Any = AutoModelForCausalLM.from_pretrained(bench.checkpoint.path, dtype=dtype).to(bench.device)
    held = bench.shape.positions[0]
    cache = DynamicCache(config=model.config)

    def step(ids_BT: torch.Tensor) -> None:
        model(ids_BT, use_cache=True, **{CACHE_ARGUMENT: cache}, logits_to_keep=1)

    def one() -> None:
        step(torch.zeros((1, 1), dtype=torch.int64, device=bench.device))
        cache.crop(-1)

    with torch.inference_mode():
        step(torch.zeros((1, held), dtype=torch.int64, device=bench.device))
        step_s = bench.seconds(one)
    return {"tokens_per_s": 1 / step_s}


def prefill(bench: Bench) -> Any:
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        span = bench.span(dtype)
        side = 64 if bench.tiny else 4096
        square = torch.randn(side, side, device=bench.device, dtype=dtype)
        peak = 2 * side**3 / bench.seconds(lambda square=square: square @ square)
        for count in bench.shape.positions:
            runner = bench.runner(span, 1, 0)
            x = bench.hidden(span, 1, min(count, 512))

            def chunk(runner: StageRunner = runner, x: torch.Tensor = x) -> None:
                runner.run([StepInput(0, x, WANT_NOTHING)])
                runner.truncate(0, 0)

            tokens_per_s = x.shape[1] / bench.seconds(chunk)
            flops = 2 * span.weight_bytes / dtype.itemsize * tokens_per_s
            figures = {"tokens_per_s": tokens_per_s, "of_products": flops / peak}
            found.append({"dtype": str(dtype), "positions": x.shape[1], **figures})
            runner.pool.close_all()
        span.close()
    return found


def hop(bench: Bench) -> Any:
    return asyncio.run(_hop(bench))


async def _hop(bench: Bench) -> Any:
    span, executor, found = bench.span(torch.bfloat16), Executor(), []
    await executor.call(Urgency.CONTROL, bench.use, kind="try")
    for sessions in bench.shape.sessions:
        runner = bench.runner(span, sessions, bench.shape.positions[0], capture=True)
        await (worker := Worker(runner, executor)).start()
        hidden_BTH = bench.hidden(span, 1, 1)
        model_s = await worker.call("model", lambda run=_one_step(runner, hidden_BTH, sessions): bench.seconds(run))
        for codec in (Codec.NONE, Codec.INT8):
            jobs = [_job(session, runner.length(session), hidden_BTH, codec) for session in range(sessions)]
            pass_s = await worker.call(
                "pass", lambda jobs=jobs, worker=worker: bench.seconds(lambda: worker._compute(jobs))
            )
            found.append(
                {"codec": codec.name, "sessions": sessions, "pass_ms": 1e3 * pass_s, "of_it_model": model_s / pass_s}
            )
        await worker.close()
        runner.close_all(keep_span=True)
    await executor.close()
    return found


def _job(session: int, position: int, hidden_BTH: torch.Tensor, codec: Codec) -> Job:
    """Return a decode job for one position. It truncates the session to `position` first, so it can run again and again."""
    payload, then = encode(hidden_BTH.cpu(), codec), ForwardHidden(CodecSchedule(codec))
    return Job(session, position, 1, (payload,), then, lambda *_: None, 0.0, truncate=Truncate(1, position))


def memory(bench: Bench) -> Any:
    if bench.device.type != "cuda":
        return {"skipped": f"torch knows no peak of {bench.device.type} memory"}
    before = torch.cuda.memory_allocated(bench.device)
    torch.cuda.reset_peak_memory_stats(bench.device)
    span = bench.span(torch.bfloat16)
    runner = bench.runner(span, bench.shape.sessions[-1], bench.shape.positions[0])
    counted = span.weight_bytes + runner.pool.allocated_bytes + span.pass_bytes(512, 1)
    peak = torch.cuda.max_memory_allocated(bench.device) - before
    return {"peak_bytes": peak, "ledger_bytes": counted, "ratio": peak / counted}


def codecs(bench: Bench) -> Any:
    x_N = torch.randn(bench.shape.elements)
    there_N = x_N.to(bench.device)
    found = {}
    for codec in Codec:
        keep = bench.shape.elements // 20 if codec == Codec.TOPK else 0
        info, payload = encode(there_N, codec, param=keep)
        same = bytes(payload) == bytes(encode(x_N, codec, param=keep)[1])
        encode_s = bench.seconds(lambda codec=codec, keep=keep: encode(there_N, codec, param=keep))
        decode_s = bench.seconds(lambda info=info, payload=payload: decode(info, payload, device=bench.device))
        found[codec.name] = {
            "encode_gb_per_s": x_N.nbytes / encode_s / 1e9,
            "decode_gb_per_s": x_N.nbytes / decode_s / 1e9,
            "same": same,
        }
    return found


def train(bench: Bench) -> Any:
    found = []
    for autocast in (False, True):
        count = min(512, bench.shape.positions[0])
        run = Run(data=bytes(32), steps=2, batch=2, microbatch=1, sequence=count, autocast=autocast)
        learner = Learner(load_segment(bench.checkpoint, 1, 3, device=bench.device), run)
        values = (torch.randn(1, count, bench.shape.sizes["hidden_size"], device=bench.device),)

        def there(learner: Learner = learner, values: Any = values) -> None:
            learner.forward(0, 0, 1, 3, values)
            learner.drop(0)

        def there_and_back(learner: Learner = learner, values: Any = values) -> None:
            (output_BTH,) = learner.forward(0, 0, 1, 3, values)
            learner.backward(0, (output_BTH,))
            learner.discard()

        there_s, both_s = bench.seconds(there), bench.seconds(there_and_back)
        found.append({"autocast": autocast, "tokens_per_s": count / both_s, "of_it_back": 1 - there_s / both_s})
    return found


def quantize(bench: Bench) -> Any:
    found = {}
    for method in ("none", "int8") if bench.tiny else ("none", "int8", "nf4"):
        span = bench.span(torch.bfloat16, method)
        runner = bench.runner(span, 1, bench.shape.positions[0])
        x = bench.hidden(span, 1, 1)

        def step(runner: StageRunner = runner, x: torch.Tensor = x) -> None:
            runner.run([StepInput(0, x)])
            runner.truncate(0, runner.length(0) - 1)

        found[method] = {"tokens_per_s": 1 / bench.seconds(step), "weight_bytes": span.weight_bytes}
        runner.close_all()
    return found


def text(bench: Bench) -> Any:
    count = 8 if bench.tiny else 64
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        span = load_span(bench.checkpoint, 0, bench.shape.layers + 2, device=bench.device, dtype=dtype, check=False)
        alone = _generate(span, ["a"], count)["a"]
        batch = _generate(span, ["a", "b", "c"], count)["a"]
        replayed = _generate(span, ["a"], count, told=alone[: count // 2])["a"]
        found[str(dtype)] = {
            "in a batch": _first_difference(alone, batch),
            "replayed": _first_difference(alone, replayed),
        }
        span.close()
    return found


def _generate(span: ModelSpan, names: list[str], count: int, told: list[int] | None = None) -> dict[str, list[int]]:
    """Return greedy texts of sessions with prompts of unlike lengths. `told` is replayed first, as one chunk."""
    runner = StageRunner(span, RunnerConfig(1 << 30))
    ids = {name: [ord(name) % 90, *range(3 * index + 2)] for index, name in enumerate(names)}
    texts: dict[str, list[int]] = {name: list(told or []) for name in names}
    for name in names:
        runner.open(name, rows=1, max_length=count + 64)
    feed = {name: ids[name] + texts[name] for name in names}
    while len(texts[names[0]]) < count:
        works = [StepInput(name, torch.tensor([tokens])) for name, tokens in feed.items()]
        for result in runner.run(works):
            name = str(result.session_id)
            texts[name].append(int(result.output[0, -1].argmax()))
            feed[name] = texts[name][-1:]
    return texts


def _first_difference(one: list[int], other: list[int]) -> int | None:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def packed(bench: Bench) -> Any:
    """Decode with packed layers beside plain ones, which take turns."""
    on_card = bench.device.type == "cuda"
    dtype = torch.bfloat16 if on_card and not bench.tiny else torch.float32
    found: dict[str, Any] = {"dtype": str(dtype)}
    for form in ("Q4_0", "Q8_0") if bench.tiny else ("Q4_0", "Q4_K", "Q6_K"):
        with tempfile.TemporaryDirectory() as name:
            checkpoint = _packed_checkpoint(bench, form, Path(name))
            plain, ours = (
                load_span(
                    checkpoint,
                    1,
                    bench.shape.layers + 1,
                    device=bench.device,
                    dtype=dtype,
                    products=products,
                    check=False,
                )
                for products in ("plain", "fast")
            )
        found[form] = {
            "bytes_of_plain": ours.weight_bytes / plain.weight_bytes,
            "products": sorted({f"{part.outputs}x{part.inputs}: {part.product}" for part in _card_parts(ours)}),
            "decode": [_beside(bench, plain, ours, sessions) for sessions in bench.shape.sessions],
            "prompt": _prompts_beside(bench, plain, ours),
        }
        for span in (plain, ours):
            span.close()
    return found


def _card_parts(span: ModelSpan) -> list[card_matrix.CardMatrix]:
    return [part for weight in held_by(span.model) for part in weight.card_parts]


def _packed_checkpoint(bench: Bench, form: str, folder: Path) -> Checkpoint:
    """Write a checkpoint whose layers have random packed matrices."""
    shutil.copy(bench.checkpoint.path / "config.json", folder)
    plain, index, kind = {}, {}, FORMATS[form]
    random = np.random.default_rng(3)
    slices = bench.checkpoint.open_slices(bench.checkpoint.tensors_of(1, bench.shape.layers + 1))
    with (folder / "weights.gguf").open("wb") as file:
        for name, part in slices.items():
            if len(shape := part.get_shape()) == 1:
                plain[name] = part[:]
                continue
            blocks = random.integers(0, 256, (shape[0] * shape[1] // kind.block, kind.block_bytes), dtype=np.uint8)
            for place, scale in SCALES[form].items():
                blocks[:, place : place + 2] = np.array([scale], dtype=np.float16).view(np.uint8)
            begin = file.tell()
            file.write(blocks.data)
            entry = {"file": "weights.gguf", "format": form, "shape": shape, "begin": begin, "end": file.tell()}
            index[name] = entry
    save_file(plain, folder / "model.safetensors")
    (folder / PACKED_NAME).write_text(json.dumps({"format": 1, "tensors": index}))
    return Checkpoint(folder)


def experts(bench: Bench) -> Any:
    """Decode with experts on the card, a quarter of them there, and none, which take turns."""
    if bench.device.type != "cuda":
        return {"skipped": "a CPU has no other memory beside it"}
    sys.path.append(str(Path(__file__).parent))
    from experts import MIXTURES, Mixture, write_mixture
    from packed import packed_folder

    mixture, layers, count = (Mixture(8, 64, 2), 2, 3) if bench.tiny else (MIXTURES["large"], 8, ROUTED_STEPS)
    dtype = torch.float32 if bench.tiny else torch.bfloat16
    cpu = torch.device("cpu")
    ways: dict[str, tuple[torch.device, torch.dtype, int]] = {
        "card": (bench.device, dtype, 0), "quarter": (bench.device, dtype, mixture.experts // 4), "cpu": (cpu, torch.float32, 0),
    }  # fmt: skip
    found: dict[str, Any] = {"dtype": str(dtype), "experts": mixture.experts, "active": mixture.used}
    with tempfile.TemporaryDirectory() as name:
        write_mixture(file := Path(name) / "mixture.gguf", mixture, "Q4_0" if bench.tiny else "Q4_K", layers=layers)
        checkpoint = Checkpoint(packed_folder(file, Path(name)))
        spans = {
            way: load_span(
                checkpoint, 1, layers + 1, device=device, dtype=own, products="fast", card_experts=on_card, check=False
            )
            for way, (device, own, on_card) in ways.items()
        }
        found["bytes"] = {way: {"device": span.weight_bytes, "host": span.host_bytes()} for way, span in spans.items()}
        for sessions in bench.shape.sessions:
            runners = {way: bench.runner(span, sessions, bench.shape.positions[0]) for way, span in spans.items()}
            times_s: dict[str, list[float]] = {way: [] for way in runners}
            inputs = [[torch.randn(1, 1, spans["cpu"].hidden_size) for _ in range(sessions)] for _ in range(count)]
            for xs, (way, runner) in itertools.product(inputs, runners.items()):
                steps = [StepInput(number, x.to(runner.span.device, runner.span.dtype)) for number, x in enumerate(xs)]
                synchronize(runner.span.device)
                began_s = time.perf_counter()
                runner.run(steps)
                synchronize(runner.span.device)
                times_s[way].append(time.perf_counter() - began_s)
            middle_s = {way: statistics.median(each) for way, each in times_s.items()}
            for runner in runners.values():
                runner.close_all(keep_span=True)
            speeds = {f"{way}_tokens_per_s": sessions / step_s for way, step_s in middle_s.items()}
            ratios = {f"quarter_of_{way}": middle_s[way] / middle_s["quarter"] for way in ("card", "cpu")}
            found[f"{sessions} sessions"] = {**speeds, **ratios}
        pool = spans["quarter"].expert_pools[0]
        found["found on the card"] = pool.hits / max(1, pool.hits + pool.misses)
        for span in spans.values():
            span.close()
    return found


def _beside(bench: Bench, plain: ModelSpan, ours: ModelSpan, sessions: int) -> dict[str, Any]:
    """Return the tokens/s of both, captured if the device can, in turns."""
    positions = bench.shape.positions[0]
    best_s: dict[str, float] = {}
    runners = {"plain": bench.runner(plain, sessions, positions, capture=True)}
    runners["packed"] = bench.runner(ours, sessions, positions, capture=True)
    for _ in range(PACKED_ROUNDS):
        for name, runner in runners.items():
            step = _one_step(runner, bench.hidden(runner.span, 1, 1), sessions)
            for _ in range(STEADY_STEPS):
                step()
            best_s[name] = min(best_s.get(name, float("inf")), bench.seconds(step))
    captured = {name: runner.captured is not None and runner.captured.replays > 0 for name, runner in runners.items()}
    for runner in runners.values():
        runner.close_all(keep_span=True)
    speeds = {f"{name}_tokens_per_s": sessions / step_s for name, step_s in best_s.items()}
    return {"sessions": sessions, "captured": captured, **speeds, "packed_of_plain": best_s["plain"] / best_s["packed"]}


def _prompts_beside(bench: Bench, plain: ModelSpan, ours: ModelSpan) -> dict[str, float]:
    """Return the tokens/s of a prompt of both, in turns."""
    best_s: dict[str, float] = {}
    for _ in range(PACKED_ROUNDS):
        for name, span in (("plain", plain), ("packed", ours)):
            runner = bench.runner(span, 1, 0)
            x = bench.hidden(span, 1, min(512, bench.shape.positions[0]))

            def chunk(runner: StageRunner = runner, x: torch.Tensor = x) -> None:
                runner.run([StepInput(0, x, WANT_NOTHING)])
                runner.truncate(0, 0)

            best_s[name] = min(best_s.get(name, float("inf")), bench.seconds(chunk))
            runner.close_all(keep_span=True)
    count = min(512, bench.shape.positions[0])
    speeds = {f"{name}_tokens_per_s": count / prompt_s for name, prompt_s in best_s.items()}
    return {"positions": count, **speeds, "packed_of_plain": best_s["plain"] / best_s["packed"]}


def node(bench: Bench) -> Any:
    """Serve the model by processes on this device."""
    if _is_simulated():
        return {"skipped": "a simulated device is of one process"}
    half = (bench.shape.layers + 2) // 2
    spans = {
        "first": f"0:{half}",
        "second": f"{half}:{bench.shape.layers + 2}",
        "spare": f"{half}:{bench.shape.layers + 2}",
    }
    found = {}
    for dtype in ("float32", "bfloat16") if bench.device.type == "cuda" else ("float32",):
        with tempfile.TemporaryDirectory() as name, LocalSwarm(Path(name)) as swarm:
            swarm.create(bench.checkpoint.path)
            swarm.bootstrap()
            options = ["--device", str(bench.device), "--dtype", dtype, "--weights", str(bench.checkpoint.path)]
            if bench.device.type == "cuda":
                options += ["--memory", f"{torch.cuda.mem_get_info(bench.device)[0] // 4}"]
            members = [swarm.node(name, "--span", span, *options) for name, span in spans.items()]
            for member in members:
                member.wait_for("ready")
            found[dtype] = asyncio.run(_over_nodes(bench, swarm, members))
    return found


def _is_simulated() -> bool:
    return torch.cuda.is_available() and not torch.backends.cuda.is_built()


async def _over_nodes(bench: Bench, swarm: LocalSwarm, members: list[NodeProcess]) -> dict[str, Any]:
    client = await joined(swarm, len(members))
    try:
        token_ms = {sessions: await _token_ms(bench, client, sessions) for sessions in (1, 8)}
        (truth, _) = await _told(bench, client)
        text, pause_s = await _told(bench, client, members)
        return {
            "ms_per_token": token_ms,
            "tokens_per_s": {sessions: 1e3 * sessions / ms for sessions, ms in token_ms.items()},
            "after a kill": {"longest_pause_s": pause_s, "first_difference": _first_difference(truth, text)},
        }
    finally:
        await client.close()


def _prompt(bench: Bench, number: int) -> list[int]:
    vocabulary = bench.shape.sizes["vocab_size"]
    return [5 + (7 * position + 13 * number) % (vocabulary - 5) for position in range(16)]


async def _token_ms(bench: Bench, client: PlainClient, sessions: int) -> float:
    """Return the median milliseconds between two tokens of a session."""
    gaps_s: list[float] = []

    async def one(number: int) -> None:
        stream = await client.stream(_prompt(bench, number), max_new_tokens=TEXT)
        moments_s = [time.perf_counter() async for _ in stream]
        gaps_s.extend(after - before for before, after in itertools.pairwise(moments_s))

    for _ in range(NODE_ROUNDS):
        await asyncio.gather(*map(one, range(sessions)))
    return 1e3 * statistics.median(gaps_s)


async def _told(
    bench: Bench, client: PlainClient, killed_of: list[NodeProcess] | None = None
) -> tuple[list[int], float]:
    """Generate a text. Returns its ids and the longest pause. The second node of its route is killed on the way, if it is one of
    `killed_of`."""
    stream = await client.stream(_prompt(bench, 0), max_new_tokens=TEXT)
    number = 0
    async for _ in stream:
        number += 1
        if number == KILL_AT and killed_of:
            victim = stream.result.route[-1].peer
            next(member for member in killed_of if member.peer == victim).kill()
    return stream.result.ids, stream.result.longest_stall_s


PARTS: dict[str, Callable[[Bench], Any]] = {
    "correct": correct, "decode": decode_steps, "prefill": prefill, "hop": hop, "memory": memory, "codecs": codecs, "train": train,
    "quantize": quantize, "text": text, "packed": packed, "experts": experts, "node": node,
}  # fmt: skip


def measure(parts: Iterable[str], device: str, *, tiny: bool, figure_s: float = 0.1) -> Iterator[dict[str, Any]]:
    """Yield each part's findings, with the device and the versions that they were measured with."""
    probed = probe_device(device)
    machine = {"device": probed.name, "torch": torch.__version__, "python": platform.python_version()}
    with tempfile.TemporaryDirectory() as folder, torch.device("cpu"):
        bench = Bench(probed, TINY if tiny else FULL, Path(folder), figure_s)
        for part in parts:
            yield {"part": part, **machine, "found": PARTS[part](bench)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds for each figure")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    try:
        for found in measure(options.parts, options.device, tiny=options.tiny, figure_s=options.seconds):
            print(json.dumps(found), flush=True)
    except SwarmnodeError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
