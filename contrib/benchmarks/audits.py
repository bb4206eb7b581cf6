"""Audits on a small Llama: deviations of honest replicas, false alarms, and steps until a liar is found. Prints JSON.

    OMP_NUM_THREADS=1 python contrib/benchmarks/audits.py [--comparisons 1000000] [--trials 100] [--table] [--seed 1]
    python contrib/benchmarks/audits.py --packed MODEL.gguf [--positions 1000000] [--layers 2] [--seed 1]
    python contrib/benchmarks/audits.py --equal-bits [--model FOLDER] [--layers 6]

An honest pair computes the same text twice, through three hops. Once as it is served: a prompt, then steps, in passes of ever
other sessions and of several positions now and then; one session in four loses its caches half-way and replays. Once as an audit
does: the whole text in chunks. Compared is what the two hops send on, in sketches, and the tokens of the third.

A liar's work is judged by the code that clients run, at the default budget and the mean share: half of what newcomers get.
`--table` prints the rows of `swarmnode/plan/audits.py`.

`--packed` compares packed models by the digests of peers of one class of equal bits, between one thread and two. It prints how many
positions differ among honest peers, after each round of texts, and in how many texts of the first round a lie shows. With
`--layers N` a text goes through the first N layers and through the last N without the head, instead of the whole model: more
positions an hour, of the same products, caches and passes.

`--equal-bits` prints tokens/s with `run --equal-bits` relative to plain products in bfloat16, of decoding and of a prompt
of 512; and of a session of 640 positions whose hop states digests, relative to one without a statement, and its bytes
relative to sketches. All by CPU seconds of one thread, in turns. Without --model the weights are random, in the shapes of
SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the line above: it reads OMP_NUM_THREADS when it is imported
from torch import Tensor

from swarmnode.codec.audit_messages import SEED_BYTES
from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode, encode
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput
from swarmnode.compute.serving.sketch import deviations, digests, sketch
from swarmnode.config import FAST, INT8_KV, PLAIN
from swarmnode.founding.model_source import open_model
from swarmnode.plan.audits import AuditBudget, Calibration, cost_of, judge_states, judge_tokens

LAYERS, WIDTH, VOCABULARY = 8, 64, 512
HOPS = ((0, 4), (4, 8), (8, LAYERS + 2))
SESSIONS, POSITIONS, PROMPT, CHUNK = 48, 128, 32, 128
SEGMENT = 64
PLAIN_WEIGHTS = ("float32", "bfloat16", "float16", "float32+kv8", "bfloat16+kv8", "float16+kv8")
FORMATS = (*PLAIN_WEIGHTS, "bfloat16-int8", "bfloat16-nf4")
CODECS = (Codec.NONE, Codec.BF16, Codec.FP16, Codec.INT8, Codec.INT4)
STEP_S, PROMPT_POSITION_S = 1.0, 4 / 64  # of a card: a pass of 64 positions costs four decode steps
MEAN_TRUST = 2 / 3  # trust at which a peer is audited at the mean share
NOISE_FACTOR, ONE_STEP_IN = 20.0, 10
MAX_STEPS = 20_000  # of a liar that is never found

Passes = Iterator[list[tuple[int, int, int]]]
"""Pass after pass: (session, first position, end) of all that take part"""


@dataclass(frozen=True)
class Replica:
    """Model and number format that one set of peers computes with."""

    checkpoint: Checkpoint
    number_format: str

    def runners(self) -> list[StageRunner]:
        numbers, _, quantize = self.number_format.partition("-")
        dtype, _, kv = numbers.partition("+")
        spans = (
            load_span(self.checkpoint, *hop, dtype=getattr(torch, dtype), quantize=quantize or "none") for hop in HOPS
        )
        return [StageRunner(span, RunnerConfig(cache_bytes=1 << 30, kv=INT8_KV if kv else PLAIN)) for span in spans]


@dataclass(frozen=True)
class PackedReplica(Replica):
    """Packed model with fast products, in three hops. Its spans are loaded once."""

    layers: int = 0  # of each of two hops; 0: the whole model in three
    spans: list[ModelSpan] = field(default_factory=list)

    def runners(self) -> list[StageRunner]:
        units, layers = self.checkpoint.family.units, self.layers
        third = units // 3
        if not self.spans:
            hops = [(0, third), (third, 2 * third), (2 * third, units)]
            if layers:
                hops = [(0, layers + 1), (units - 1 - layers, units - 1)]  # without the embedding and the head
            dtype = getattr(torch, self.number_format)
            self.spans.extend(load_span(self.checkpoint, *hop, dtype=dtype, products=FAST) for hop in hops)
        return [StageRunner(span, RunnerConfig(cache_bytes=1 << 30)) for span in self.spans]


@dataclass(frozen=True)
class Work:
    """Results of a set of sessions: per hop but the last the hidden_STH that it sent on, and tokens_ST."""

    hidden: list[Tensor]
    tokens_ST: Tensor


def save_model(folder: Path, seed: int) -> Checkpoint:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    return Checkpoint(folder)


def as_served(dice: random.Random) -> Passes:
    """Yield the passes of serving: whole prompts one by one, then steps of random sets of sessions, now and then of several
    positions."""
    held = [0] * SESSIONS
    for session in range(SESSIONS):
        yield [(session, 0, PROMPT)]
        held[session] = PROMPT
    while min(held) < POSITIONS:
        going = [session for session in range(SESSIONS) if held[session] < POSITIONS]
        present = dice.sample(going, max(1, int(len(going) * dice.choice((0.3, 0.9, 1.0, 1.0)))))
        drafted = dice.choice((1, 1, 1, 1, 1, 3))
        works = [(session, held[session], min(POSITIONS, held[session] + drafted)) for session in present]
        for session, _start, end in works:
            held[session] = end
        yield works


def as_audited(chunks: Sequence[int] = (CHUNK,), dice: random.Random | None = None) -> Passes:
    """Yield the passes of an audit: each text alone, in parts of one of the `chunks`."""
    for session in range(SESSIONS):
        size = (dice or random).choice(chunks)
        for start in range(0, POSITIONS, size):
            yield [(session, start, min(POSITIONS, start + size))]


@torch.inference_mode()
def compute(replica: Replica, ids_ST: Tensor, passes: Passes, codec: Codec, resumed: Sequence[int] = ()) -> Work:
    """Run all sessions through all hops. The sessions in `resumed` lose their caches half-way, and replay all before."""
    runners = replica.runners()
    lost = set(resumed)

    def open_session(session: int) -> None:
        for runner in runners:
            runner.open(session, rows=1, max_length=POSITIONS)

    def run(works: list[tuple[int, int, int]], keep: bool) -> None:
        x = {session: ids_ST[session : session + 1, start:end] for session, start, end in works}
        for index, runner in enumerate(runners):
            results = runner.run([StepInput(session, x[session], want=WANT_ALL) for session in x])
            for (session, start, end), result in zip(works, results, strict=True):
                if runner.span.end == replica.checkpoint.family.units:
                    tokens_ST[session, start:end] = result.output[0].float().argmax(-1)
                    continue
                sent_BTH = decode(*encode(result.output, codec))
                x[session] = sent_BTH.to(runner.span.dtype)
                if keep:
                    hidden[index][session, start:end] = sent_BTH[0]

    dtype = runners[0].span.dtype
    width = runners[0].span.hidden_size
    sending = [runner for runner in runners if runner.span.end < replica.checkpoint.family.units]
    hidden = [torch.zeros(SESSIONS, POSITIONS, width, dtype=dtype) for _ in sending]
    tokens_ST = torch.zeros(SESSIONS, POSITIONS, dtype=torch.int64)
    for session in range(SESSIONS):
        open_session(session)
    for works in passes:
        for session, start, _end in works:
            if session in lost and start >= POSITIONS // 2:
                lost.discard(session)
                for runner in runners:
                    runner.close(session)
                open_session(session)
                run([(session, 0, start)], keep=False)
        run(works, keep=True)
    return Work(hidden, tokens_ST)


def pair(replica: Replica, codec: Codec, seed: int, other: Replica | None = None) -> tuple[Work, Work]:
    """Compute the same texts as `replica` serves them, and as an audit computes them on `other` (default: on `replica`)."""
    generator = torch.Generator().manual_seed(seed)
    ids_ST = torch.randint(0, VOCABULARY, (SESSIONS, POSITIONS), generator=generator)
    served = compute(replica, ids_ST, as_served(random.Random(seed)), codec, range(0, SESSIONS, 4))
    return served, compute(other or replica, ids_ST, as_audited(), codec)


def apart(one_TH: Tensor, other_TH: Tensor, dice: random.Random) -> list[float]:
    seed = dice.randbytes(16)
    return deviations(sketch(one_TH, seed), sketch(other_TH, seed))


# -- honest pairs


def honest(checkpoint: Checkpoint, comparisons: int, seed: int) -> dict[str, Any]:
    """Compare the work of honest pairs until `comparisons` positions are compared, over all formats and codecs in turn."""
    began_s, dice, calibration = time.perf_counter(), random.Random(seed), Calibration()
    done = alarms = segments = 0
    worst = 0.0
    kinds = [(number_format, codec) for number_format in FORMATS for codec in CODECS]
    kinds = [(f, c) for f, c in kinds if f in ("float32", "bfloat16") or c in (Codec.NONE, Codec.INT8)]
    by_kind: dict[str, int] = {}
    while done < comparisons:
        seed += 1
        for number_format, codec in kinds:
            served, again = pair(Replica(checkpoint, number_format), codec, seed)
            for session in range(SESSIONS):
                for start in range(0, POSITIONS, SEGMENT):
                    part = slice(start, start + SEGMENT)
                    for index, (_start, units) in enumerate(HOPS):
                        tolerance = partial(calibration.tolerance, number_format, codec, units=units)
                        if index + 1 < len(HOPS):
                            found = apart(served.hidden[index][session, part], again.hidden[index][session, part], dice)
                            judged = judge_states(found, tolerance(deviations=found))
                            worst = max(worst, judged.worst)
                        else:
                            drawn = (work.tokens_ST[session, part].tolist() for work in (served, again))
                            judged = judge_tokens(*drawn, tolerance())
                        done, segments, alarms = done + judged.compared, segments + 1, alarms + judged.false
                        if judged.false:
                            name = f"{number_format} {codec.name}"
                            by_kind[name] = by_kind.get(name, 0) + 1
            if done >= comparisons:
                break
    return {
        "comparisons": done,
        "segments": segments,
        "false_alarms": alarms,
        "false_alarms_by_kind": by_kind,
        "worst_over_tolerance": round(worst, 3),
        "seconds": round(time.perf_counter() - began_s, 1),
    }


def table(checkpoint: Checkpoint, seed: int) -> dict[str, Any]:
    """Measure deviations behind the second hop for each format and codec: median, 99.99th percentile and the share of other
    tokens."""
    rows = {}
    for number_format in PLAIN_WEIGHTS:
        for codec in CODECS:
            served, again = pair(Replica(checkpoint, number_format), codec, seed)
            found = torch.tensor(apart(served.hidden[1].flatten(0, 1), again.hidden[1].flatten(0, 1), random.Random(1)))
            rows[f"{number_format} {codec.name}"] = {
                "median": float(found.median()),
                "p9999": float(found.double().quantile(0.9999)),
                "other_tokens": float((served.tokens_ST != again.tokens_ST).float().mean()),
            }
    return rows


# -- one class of equal bits


def of_one_class(replica: PackedReplica, positions: int, seed: int, vocabulary: int) -> dict[str, Any]:
    """Compare texts as they are served, and as an audit computes them, by digests. In half of the rounds one of the two has one
    thread and the other two. Prints the counts after each round."""
    dice, done, differ, codecs = random.Random(seed), 0, 0, (Codec.NONE, Codec.INT8, Codec.BF16)
    lies = {name: [0, 0] for name in LIES}
    began_s = time.process_time()
    while done < positions:
        seed += 1
        codec = codecs[seed % len(codecs)]
        ids_ST = torch.randint(0, vocabulary, (SESSIONS, POSITIONS), generator=torch.Generator().manual_seed(seed))
        threads = THREADS[seed % len(THREADS)]
        torch.set_num_threads(threads[0])
        served = compute(replica, ids_ST, as_served(random.Random(seed)), codec, range(0, SESSIONS, 4))
        torch.set_num_threads(threads[1])
        again = compute(replica, ids_ST, as_audited(CHUNKS, dice), codec)
        torch.set_num_threads(1)
        key = dice.randbytes(SEED_BYTES)
        for session in range(SESSIONS):
            known = [digests(hidden[session], key) for hidden in again.hidden]
            apart_T = torch.tensor(
                [deviations(digests(h[session], key), k) for h, k in zip(served.hidden, known, strict=True)]
            )
            differ += int(((apart_T > 0).any(0) | (served.tokens_ST[session] != again.tokens_ST[session])).sum())
            for name, lie in LIES.items() if done == 0 else ():
                lied_TH = lie(served.hidden[0][session].clone(), dice.randrange(1, POSITIONS))
                lies[name][0] += max(deviations(digests(lied_TH, key), known[0])) > 0
                lies[name][1] += 1
        done += ids_ST.numel()
        found = {"positions": done, "differ": differ, "texts in which a lie shows": lies}
        print(json.dumps(found | {"cpu_s": round(time.process_time() - began_s)}), file=sys.stderr, flush=True)
    return found


def _one_bit(hidden_TH: Tensor, at: int) -> Tensor:
    hidden_TH[at, 3] = hidden_TH[at, 3].nextafter(hidden_TH[at, 3] + 1)
    return hidden_TH


def _noise(hidden_TH: Tensor, at: int) -> Tensor:
    noise_H = torch.randn(hidden_TH.shape[1], generator=torch.Generator().manual_seed(at))
    hidden_TH[at] += 0.03 * hidden_TH[at].norm() / noise_H.norm() * noise_H
    return hidden_TH


def _swapped(hidden_TH: Tensor, at: int) -> Tensor:
    hidden_TH[[at, at - 1]] = hidden_TH[[at - 1, at]]
    return hidden_TH


THREADS = (1, 2), (1, 1), (2, 1), (1, 1)  # as served, and as audited
CHUNKS = (7, 32, 33, 64, POSITIONS)  # of an audit's prompts
LIES = {"one bit": _one_bit, "3 % of noise": _noise, "swapped": _swapped}

# -- liars


def perturbed(hidden_TH: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Return the states with noise of `size` of a state's length on a random tenth of the positions."""
    hidden_TH = hidden_TH.float()
    noise_TH = torch.randn(hidden_TH.shape, generator=generator)
    noise_TH *= size * hidden_TH.norm(dim=-1, keepdim=True) / noise_TH.norm(dim=-1, keepdim=True)
    chosen_T = torch.rand(len(hidden_TH), generator=generator) < 1 / ONE_STEP_IN
    return hidden_TH + noise_TH * chosen_T[:, None]


def is_false(deviations: list[float], number_format: str) -> bool:
    """Return whether a client without earlier measurements judges these deviations of the first hop as false."""
    tolerance = Calibration().tolerance(number_format, Codec.NONE, units=HOPS[0][1], deviations=deviations)
    return judge_states(deviations, tolerance).false


def steps_until_out(served: Tensor, again: Tensor, size: float, number_format: str, seed: int) -> int:
    """Return the number of steps that a perturbing peer has served when an audit first finds it; at least `MAX_STEPS` if
    none does."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    budget, steps = AuditBudget(), 0
    cost = cost_of(PROMPT, POSITIONS - PROMPT, decode_s=STEP_S, prefill_s=PROMPT_POSITION_S)
    while steps < MAX_STEPS:
        session = dice.randrange(SESSIONS)
        steps += POSITIONS - PROMPT
        if dice.random() >= budget.chance(cost, MEAN_TRUST):
            continue
        budget.spend(cost)
        lied_TH = perturbed(served[session], size, generator)
        if is_false(apart(lied_TH, again[session], dice), number_format):
            return steps
    return steps


def perturbers(checkpoint: Checkpoint, trials: int, seed: int) -> dict[str, Any]:
    """Measure the steps until audits find peers that perturb a tenth of the positions by twenty times the honest noise."""
    results = {}
    for number_format in ("float32", "bfloat16"):
        served, again = (work.hidden[0] for work in pair(Replica(checkpoint, number_format), Codec.NONE, seed))
        differences = (served.double() - again.double()).norm(dim=-1) / again.double().norm(dim=-1)
        noise = float(differences.square().mean().sqrt())
        size = NOISE_FACTOR * noise
        steps = sorted(steps_until_out(served, again, size, number_format, seed + n) for n in range(trials))
        results[number_format] = {
            "noise": noise,
            "steps_median": statistics.median(steps),
            "steps_p99": steps[min(len(steps) - 1, round(0.99 * len(steps)) - 1)],
            "steps_most": steps[-1],
        }
    return results


def gross_liars(checkpoint: Checkpoint, other: Checkpoint, seed: int) -> dict[str, Any]:
    """Return per kind of gross lie the result of `most_segments` over all sessions."""
    bf16 = Replica(checkpoint, "bfloat16")
    liars = {
        "nf4 for bf16": Replica(checkpoint, "bfloat16-nf4"),
        "another seed's weights": Replica(other, "bfloat16"),
    }
    results: dict[str, Any] = {}
    for name, liar in liars.items():
        served, again = pair(liar, Codec.NONE, seed, bf16)
        results[name] = most_segments(served.hidden[0], again.hidden[0], seed)
    results["fewer layers"] = most_segments(*skipped(checkpoint, seed), seed)
    served, again = pair(bf16, Codec.NONE, seed)
    replayed = torch.cat([served.hidden[0][:, :1], served.hidden[0][:, :-1]], dim=1)
    results["replayed states"] = most_segments(replayed, again.hidden[0], seed)
    return results


@torch.inference_mode()
def skipped(checkpoint: Checkpoint, seed: int) -> tuple[Tensor, Tensor]:
    """Return the states that the first hop sends on without its last layer, and those with it."""
    generator = torch.Generator().manual_seed(seed)
    ids_ST = torch.randint(0, VOCABULARY, (SESSIONS, POSITIONS), generator=generator)
    sent = []
    for units in (HOPS[0][1] - 1, HOPS[0][1]):
        runner = StageRunner(load_span(checkpoint, 0, units, dtype=torch.bfloat16), RunnerConfig(cache_bytes=1 << 30))
        for session in range(SESSIONS):
            runner.open(session, rows=1, max_length=POSITIONS)
        outputs = [runner.run([StepInput(n, ids_ST[n : n + 1], want=WANT_ALL)])[0].output for n in range(SESSIONS)]
        sent.append(torch.cat(outputs))
    return sent[0], sent[1]


def most_segments(sent_STH: Tensor, honest_STH: Tensor, seed: int) -> int | None:
    """Return the longest run of segments up to one found false; None if the segments after the last such one all passed."""
    dice = random.Random(seed)
    most, since = 0, 0
    for session in range(SESSIONS):
        for start in range(0, POSITIONS, SEGMENT):
            part = slice(start, start + SEGMENT)
            since += 1
            if is_false(apart(sent_STH[session, part], honest_STH[session, part], dice), "bfloat16"):
                most, since = max(most, since), 0
    return most if since == 0 else None


@torch.inference_mode()
def steps_of_a_pass(checkpoint: Checkpoint) -> float:
    """Return the time of a pass over 64 positions on this machine, in decode steps of one session."""
    runner = StageRunner(load_span(checkpoint, *HOPS[0]), RunnerConfig(cache_bytes=1 << 28))
    times: dict[int, list[float]] = {1: [], SEGMENT: []}
    for number in range(30):
        for count, seconds in times.items():
            runner.open(number, rows=1, max_length=SEGMENT)
            began_s = time.perf_counter()
            runner.run([StepInput(number, torch.zeros(1, count, dtype=torch.int64), want=WANT_ALL)])
            seconds.append(time.perf_counter() - began_s)
            runner.close(number)
    return statistics.median(times[SEGMENT]) / statistics.median(times[1])


SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
TURNS, STEPS, LONG = 9, 16, 512


@torch.inference_mode()
def costs(folder: Path | None, layers: int) -> dict[str, Any]:
    """Return the costs of equal bits and of digests: tokens/s as ratios of medians over TURNS turns."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        if folder is None:
            folder = Path(scratch)
            torch.manual_seed(1)
            config = LlamaConfig(**SMOLLM2, vocab_size=4096, num_hidden_layers=layers)
            LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        checkpoint = Checkpoint(folder)
        units, vocabulary = min(layers + 1, checkpoint.family.units), checkpoint.config.vocab_size
        spans = {
            is_equal: load_span(checkpoint, 0, units, dtype=torch.bfloat16, equal_bits=is_equal)
            for is_equal in (False, True)
        }
    spans[False].packings.at_once.run()
    runners = {is_equal: StageRunner(span, RunnerConfig(1 << 30)) for is_equal, span in spans.items()}
    ids_BT = torch.randint(vocabulary, (1, LONG + (TURNS + 1) * STEPS), generator=torch.Generator().manual_seed(1))
    took: dict[tuple[bool, str], list[float]] = {(one, kind): [] for one in runners for kind in ("prompt", "decode")}
    for turn in range(TURNS + 1):
        for is_equal, runner in runners.items():
            session = "text"
            runner.open(session, rows=1, max_length=ids_BT.shape[1])
            parts = [("prompt", [ids_BT[:, :LONG]]), ("decode", list(ids_BT[:, LONG : LONG + 2 * STEPS].split(1, 1)))]
            for kind, inputs in parts:
                began_s = time.thread_time()
                for x in inputs:
                    runner.run([StepInput(session, x)])
                if turn:  # the first turn compiles and fills caches
                    took[is_equal, kind].append(time.thread_time() - began_s)
            runner.close(session)
    seconds = {key: statistics.median(each) for key, each in took.items()}
    hidden_TH = torch.randn(LONG + 2 * STEPS, spans[True].hidden_size).to(torch.bfloat16)
    stating: dict[str, float] = {}
    for name, state in (("digests", digests), ("sketches", sketch)):
        times: list[float] = []
        for turn in range(TURNS):
            began_s = time.thread_time()
            state(hidden_TH, turn.to_bytes(SEED_BYTES, "little"))
            state(hidden_TH, turn.to_bytes(SEED_BYTES, "little"))  # of what came in, and of what went out
            times.append(time.thread_time() - began_s)
        stating[name] = statistics.median(times)
    session_s = seconds[True, "prompt"] + seconds[True, "decode"]
    seed = bytes(SEED_BYTES)
    return {
        "equal bits, bfloat16, one thread": {
            kind: round(seconds[False, kind] / seconds[True, kind], 3) for kind in ("decode", "prompt")
        },
        "tokens/s of an audited session": {
            f"with {name}, of those without": round(session_s / (session_s + stating_s), 4)
            for name, stating_s in stating.items()
        },
        "bytes of a statement, digests of sketches": digests(hidden_TH, seed).nbytes / sketch(hidden_TH, seed).nbytes,
        "bytes of an audited session, with digests of with sketches": round(
            (hidden_TH.nbytes + digests(hidden_TH, seed).nbytes) / (hidden_TH.nbytes + sketch(hidden_TH, seed).nbytes),
            3,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=1_000_000)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--packed", metavar="MODEL.gguf")
    parser.add_argument("--positions", type=int, default=1_000_000)
    parser.add_argument("--equal-bits", action="store_true")
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--layers", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.equal_bits:
        print(json.dumps(costs(args.model, args.layers or 6), indent=2))
        return
    if args.packed:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = open_model(args.packed, Path(folder, "model"), packs=True)
            replica = PackedReplica(checkpoint, "float32", args.layers)
            found = of_one_class(replica, args.positions, args.seed, checkpoint.config.vocab_size)
        print(json.dumps(found, indent=2))
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_model(Path(folder, "model"), args.seed)
        if args.table:
            print(json.dumps(table(checkpoint, args.seed), indent=2))
            return
        other = save_model(Path(folder, "other"), args.seed + 1)
        result = {
            "a_pass_of_64_in_steps_here": round(steps_of_a_pass(checkpoint), 2),
            "one_step_in_ten_off_by_20_times_the_noise": perturbers(checkpoint, args.trials, args.seed),
            "most_segments_until_found": gross_liars(checkpoint, other, args.seed),
            "honest": honest(checkpoint, args.comparisons, args.seed),
        }
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
