"""Smallest lies that audits find, one position a text, against deviations of honest peers over kernels, adapters and models.

    OMP_NUM_THREADS=1 python contrib/studies/small_lies.py record FOLDER [--model CHECKPOINT_OR_GGUF] [--texts 32] [--seed 1]
        [--pages FILE …] [--honest]
    python contrib/studies/small_lies.py judge FOLDER [--positions 1000000] [--trials 100] [--seed 1]

`record` computes the same texts in processes whose kernels differ (those of this machine, AVX2's, and ATen's and oneDNN's oldest):
each once as it is served and once as an audit does, without and with an adapter, and once for each lie of the first hop. The states
that each hop sends on are kept in FOLDER. Without `--model` it is a small Llama with random weights. Texts are cut from `--pages`,
by default from this repository's pages; `--honest` leaves lies and adapters out. Texts that chose a bound cannot
test it.

`judge` draws from these records again and again, sketches them by fresh seeds, and compares them by the code that clients run.
It takes honest pairs of any two kernels and ways, of texts of any length, up to a number of positions. It also takes liars that lie
in every text or in one of ten, audited at the default share like peers of long standing, until they are out. Prints JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the line above: it reads OMP_NUM_THREADS when it is imported
from torch import Tensor, nn

from swarmnode.audits.audit_case import Comparison, HopAccount, TextRun, compare
from swarmnode.audits.referee import odd_one_out
from swarmnode.codec.audit_messages import SEED_BYTES
from swarmnode.codec.body import HopSpec
from swarmnode.codec.tensors import Codec
from swarmnode.compute.model.adapters.span_adapters import Lora, features_of
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput
from swarmnode.compute.serving.sketch import sketch
from swarmnode.founding.model_source import open_model
from swarmnode.plan.audits import AuditBudget, Calibration, cost_of
from swarmnode.plan.findings import are_too_many
from swarmnode.swarm.records.statement import Edge, Statement

LENGTH, PROMPT = 128, 32
FORMATS = ("float32", "bfloat16")
KERNELS = {
    "own": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "old": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
LIES = ("zeroed", "swapped", "head", "early")
WAYS = ("served", "audited")
SHORTEST = 8  # of the texts that are judged
TEXTS = 500  # of a liar
STEP_S, PROMPT_POSITION_S = 1.0, 4 / 64  # of a card: a pass of 64 positions costs four decode steps
RANK, STRENGTH = 4, 0.05  # of the adapter: its product is a tenth of a layer's own, or so
CHUNK_SESSIONS = 16  # decoded together


@dataclass
class Lie:
    """Lie of the first hop at the position `at`. Its `kind` is one of LIES; `head` silences one attention head of the hop's
    last layer."""

    kind: str
    at: int


def hops_of(units: int) -> tuple[tuple[int, int], ...]:
    """Return three hops over the units. The last one has the head."""
    third = units // 3
    return (0, third), (third, 2 * third), (2 * third, units)


class Pipeline:
    """Three hops on this process's kernels."""

    def __init__(self, checkpoint: Checkpoint, number_format: str, *, adapted: bool) -> None:
        self.dtype = getattr(torch, number_format)
        self.spans = [load_span(checkpoint, *hop, dtype=self.dtype) for hop in hops_of(checkpoint.family.units)]
        self.adapter = "adapter" if adapted else ""
        self.heads = checkpoint.config.num_attention_heads
        for span in self.spans if adapted else ():
            span.adapters.add("adapter", random_loras(span.model, self.dtype))

    def runners(self) -> list[StageRunner]:
        return [StageRunner(span, RunnerConfig(cache_bytes=1 << 31)) for span in self.spans]

    @torch.inference_mode()
    def compute(self, ids_ST: Tensor, *, served: bool, lies: Sequence[Lie] = ()) -> dict[str, Any]:
        """`hidden`: of each hop but the last what it sends on, hidden_STH; `drawn_ST`: the likeliest tokens."""
        sent: list[list[Tensor]] = [[], [], []]
        for first in range(0, len(ids_ST), CHUNK_SESSIONS):
            runners, part_ST = self.runners(), ids_ST[first : first + CHUNK_SESSIONS]
            for runner in runners:
                for session in range(len(part_ST)):
                    runner.open(session, rows=1, max_length=LENGTH, adapter=self.adapter)
            pieces: list[list[Tensor]] = [[], [], []]
            for start, end in as_served() if served else [(0, LENGTH)]:
                x = list(part_ST[:, start:end].unsqueeze(1))
                for index, runner in enumerate(runners):
                    if lies and index == 0:
                        x = [self._lied(runner, n, x[n], lies[first + n]) for n in range(len(x))]
                    elif served and end - start == 1:
                        x = [
                            one.output for one in runner.run([StepInput(n, x[n], want=WANT_ALL) for n in range(len(x))])
                        ]
                    else:
                        x = [runner.run([StepInput(n, x[n], want=WANT_ALL)])[0].output for n in range(len(x))]
                    pieces[index].append(torch.cat(x))
                    x = [one.to(self.dtype) for one in x]
            for index, found in enumerate(pieces):
                sent[index].append(torch.cat(found, dim=1))
        *hidden, logits = (torch.cat(found) for found in sent)
        return {"hidden": hidden, "drawn_ST": logits.float().argmax(-1)}

    def _lied(self, runner: StageRunner, session: int, x_BT: Tensor, lie: Lie) -> Tensor:
        at, hook = lie.at, None
        if lie.kind == "head":
            layer: nn.Module = [m for name, m in runner.span.model.named_modules() if name.endswith("o_proj")][-1]
            hook = layer.register_forward_pre_hook(lambda _layer, inputs: (self._silenced(inputs[0], at),))
        y_BTH = runner.run([StepInput(session, x_BT, want=WANT_ALL)])[0].output
        if hook is not None:
            hook.remove()
        elif lie.kind == "swapped":
            y_BTH = y_BTH.clone()
            y_BTH[:, [at, at - 1]] = y_BTH[:, [at - 1, at]]
        else:
            y_BTH = y_BTH.clone()
            y_BTH[:, at] = 0
        return y_BTH

    def _silenced(self, x_BTH: Tensor, at: int) -> Tensor:
        size = x_BTH.shape[-1] // self.heads
        x_BTH = x_BTH.clone()
        head = at % self.heads
        x_BTH[:, at, head * size : (head + 1) * size] = 0
        return x_BTH


def random_loras(model: nn.Module, dtype: torch.dtype) -> dict[str, Lora]:
    """Return random LoRAs for the projections of queries and values, and the last projection of each MLP."""
    generator, loras = torch.Generator().manual_seed(1), {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("q_proj", "v_proj", "down_proj"):
            inputs, outputs = features_of(module) or (0, 0)
            a_RI, b_OR = torch.randn(RANK, inputs, generator=generator), torch.randn(outputs, RANK, generator=generator)
            loras[name] = Lora((a_RI / inputs**0.5).to(dtype), (b_OR * STRENGTH).to(dtype))
    return loras


def as_served() -> Iterator[tuple[int, int]]:
    yield 0, PROMPT
    yield from ((at, at + 1) for at in range(PROMPT, LENGTH))


# -- recording


def record(folder: Path, model: str, texts: int, seed: int, pages: Sequence[Path], *, honest: bool) -> None:
    """Record every run of every kernel, one process after another; with `honest` only those without lies and adapters."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "ids.pt").exists():
        checkpoint = open_model(model, folder / "model") if model else small_llama(folder / "model", seed)
        ids_ST = texts_of(checkpoint, texts, seed, pages)
        torch.save({"checkpoint": str(checkpoint.path), "ids_ST": ids_ST}, folder / "ids.pt")
    for kernel, settings in KERNELS.items():
        command = [sys.executable, __file__, "compute", str(folder), "--kernel", kernel, "--seed", str(seed)]
        command += ["--honest"] * honest
        subprocess.run(command, env={**os.environ, **settings}, check=True)


def small_llama(folder: Path, seed: int) -> Checkpoint:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=10,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    return Checkpoint(folder)


def own_pages() -> list[Path]:
    """Return this repository's pages."""
    return sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))


def texts_of(checkpoint: Checkpoint, texts: int, seed: int, pages: Sequence[Path]) -> Tensor:
    """Return ids_ST, cut from `pages` at random places; drawn at random if the model has no tokenizer."""
    if not (checkpoint.path / "tokenizer.json").exists():
        return torch.randint(
            0, checkpoint.config.vocab_size, (texts, LENGTH), generator=torch.Generator().manual_seed(seed)
        )
    from tokenizers import Tokenizer

    text = "\n".join(page.read_text() for page in pages)
    ids = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json")).encode(text).ids
    starts = random.Random(seed).sample(range(len(ids) - LENGTH), texts)
    return torch.tensor([ids[start : start + LENGTH] for start in starts])


def compute(folder: Path, kernel: str, seed: int, *, honest: bool) -> None:
    """Compute all texts in this process, with the kernel `kernel`, and save the states of each way and lie in `folder`."""
    told = torch.load(folder / "ids.pt")
    checkpoint, ids_ST = Checkpoint(Path(told["checkpoint"])), told["ids_ST"]
    for number_format in FORMATS:
        for adapted in (False,) if honest else (False, True):
            pipeline = Pipeline(checkpoint, number_format, adapted=adapted)
            name = f"{number_format}{'+adapter' if adapted else ''}.{kernel}"
            began_s = time.perf_counter()
            for way in WAYS:
                torch.save(pipeline.compute(ids_ST, served=way == "served"), folder / f"{name}.{way}.pt")
            for kind in LIES if kernel == "own" and not adapted and not honest else ():
                dice = random.Random(seed)
                lies = [
                    Lie(kind, dice.randrange(1, 5) if kind == "early" else dice.randrange(5, LENGTH - 1))
                    for _ in ids_ST
                ]
                torch.save(pipeline.compute(ids_ST, served=False, lies=lies), folder / f"{name}.{kind}.pt")
            print(f"{name}: {time.perf_counter() - began_s:.0f} s", file=sys.stderr, flush=True)


# -- judging


class Records:
    """Recordings in one number format, without an adapter or with it."""

    def __init__(self, folder: Path, number_format: str, *, adapted: bool) -> None:
        self.number_format, self.adapted = number_format, adapted
        self._prefix = f"{number_format}{'+adapter' if adapted else ''}"
        self._folder = folder
        self.honest = {f"{kernel}.{way}": self._read(f"{kernel}.{way}") for kernel in KERNELS for way in WAYS}
        self.texts = len(self.honest["own.audited"]["drawn_ST"])

    @cached_property
    def hops(self) -> tuple[tuple[int, int], ...]:
        checkpoint = Checkpoint(Path(torch.load(self._folder / "ids.pt")["checkpoint"]))
        return hops_of(checkpoint.family.units)

    @cached_property
    def lies(self) -> dict[str, dict[str, Any]]:
        """Recorded lies by kind; `last two`: an honest run whose first hop zeroes its output at the last two positions."""
        served = self.honest["own.served"]
        first_STH = served["hidden"][0].clone()
        first_STH[:, -2:] = 0
        last_two = {"hidden": [first_STH, *served["hidden"][1:]], "drawn_ST": served["drawn_ST"]}
        recorded = {kind: self._read(f"own.{kind}") for kind in LIES if self._path(f"own.{kind}").exists()}
        return {**recorded, "last two": last_two} if recorded else {}

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._prefix}.{name}.pt"

    def _read(self, name: str) -> dict[str, Any]:
        return torch.load(self._path(name))

    def run(self, name: str, found: dict[str, Any], text: int, seed: bytes, length: int = LENGTH) -> TextRun:
        """Return the first `length` positions of a text as peers called `name` would state them."""
        sketches = [None, *(sketch(hidden_STH[text, :length], seed) for hidden_STH in found["hidden"])]
        route = [HopSpec(f"{name}{start}", start, end) for start, end in self.hops]
        accounts = [
            HopAccount(self._statement(hop, seed, length), b"", received_TK, None)
            for hop, received_TK in zip(route, sketches, strict=True)
        ]
        return TextRun(route, accounts, dict(enumerate(found["drawn_ST"][text, :length].tolist())))

    def _statement(self, hop: HopSpec, seed: bytes, length: int) -> Statement:
        edge, no_digest = Edge(b"", 0, length), bytes(32)
        units, session = (hop.start, hop.end), bytes(16)
        return Statement(
            no_digest, hop.peer, session, *units, self.number_format, Codec.NONE, seed, 0, length, edge, edge, no_digest
        )

    def compare(self, one: TextRun, other: TextRun, calibration: Calibration) -> Comparison:
        return compare(one, other, lambda _unit: Codec.NONE, calibration, adapted=self.adapted)


def false_alarms(records: Records, positions: int, dice: random.Random) -> dict[str, Any]:
    """Count false alarms for honest pairs, as a new auditor and as an auditor with many comparisons judges them."""
    pairs, known = list(itertools.combinations(records.honest, 2)), Calibration()
    done = comparisons = alarms = near = 0
    worst = 0.0
    while done < positions:
        names, text, length = dice.choice(pairs), dice.randrange(records.texts), dice.randint(SHORTEST, LENGTH)
        seed = dice.randbytes(SEED_BYTES)
        one, other = (records.run(name, records.honest[name], text, seed, length) for name in names)
        for calibration in (Calibration(), known):
            found = records.compare(one, other, calibration)
            comparisons += 1
            alarms += found.false_hop is not None
            near += found.near_hop is not None
            done += sum(judged.compared for judged in found.judgements)
            worst = max([worst, *(judged.worst for judged in found.judgements[: len(records.hops) - 1])])
    return {
        "positions": done,
        "comparisons": comparisons,
        "false_alarms": alarms,
        "near_misses": near,
        "worst_over_tolerance": round(worst, 2),
    }


def texts_until_out(records: Records, kind: str, one_in: int, dice: random.Random) -> int | None:
    """Return the number of texts until a first hop is found that lies in one of `one_in` texts; None if `TEXTS` do not suffice."""
    budget, calibration, near_misses, audited = AuditBudget(), Calibration(), 0, 0
    cost = cost_of(PROMPT, LENGTH - PROMPT, decode_s=STEP_S, prefill_s=PROMPT_POSITION_S)
    for text in range(1, TEXTS + 1):
        lies = dice.random() < 1 / one_in
        if dice.random() >= budget.chance(cost, 1.0):
            continue
        budget.spend(cost)
        audited += LENGTH
        if lies:
            verdict = judge_lie(records, kind, calibration, dice)
            near_misses += verdict == "near"
            if verdict == "false" or (verdict == "near" and are_too_many(near_misses, audited)):
                return text
    return None


def judge_lie(records: Records, kind: str, calibration: Calibration, dice: random.Random) -> str:
    """Judge a lying text against two honest runs, as an audit does, and return `false`, `near` or `passed`."""
    number, seed = dice.randrange(records.texts), dice.randbytes(SEED_BYTES)
    lied = records.run("liar", records.lies[kind], number, seed)
    second, third = (
        records.run(name, records.honest[name], number, seed) for name in dice.sample(list(records.honest), 2)
    )
    found = records.compare(lied, second, calibration)
    if found.false_hop is None and found.near_hop != 0:
        return "passed"
    again = [records.compare(run, third, calibration) for run in (lied, second)]
    compared = found.judgements[0].compared
    if found.false_hop == 0 and odd_one_out([one.agree_at(0, compared) for one in again]) == 0:
        return "false"
    return "near" if odd_one_out([one.agree_at(0, compared, closely=True) for one in again]) == 0 else "passed"


def judge(folder: Path, positions: int, trials: int, seed: int) -> dict[str, Any]:
    """Return false alarms and the texts until liars are found, by number format, without adapters and through one if recorded."""
    dice, results = random.Random(seed), {}
    recorded = list(itertools.product(FORMATS, (False, True) if any(folder.glob("*+adapter*")) else (False,)))
    for number_format, adapted in recorded:
        records = Records(folder, number_format, adapted=adapted)
        result = {"honest": false_alarms(records, positions // len(recorded), dice)}
        for kind, one_in in itertools.product([] if adapted else records.lies, (1, 10)):
            needed = [texts_until_out(records, kind, one_in, dice) for _ in range(trials)]
            out = [texts for texts in needed if texts is not None]
            result[f"{kind}, one text in {one_in}"] = {
                "found": len(out),
                "of": trials,
                "texts_median": statistics.median(out) if out else None,
                "texts_most": max(out, default=None),
            }
        results[f"{number_format}{' through an adapter' if adapted else ''}"] = result
    return results


def arguments(description: str | None, *, texts: int, positions: int) -> argparse.ArgumentParser:
    """Return the arguments of a study that records and judges; `texts` and `positions` are its defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("record", "compute", "judge"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--kernel", default="own")
    parser.add_argument("--texts", type=int, default=texts)
    parser.add_argument("--positions", type=int, default=positions)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def main() -> None:
    parser = arguments(__doc__, texts=32, positions=1_000_000)
    parser.add_argument("--pages", type=Path, nargs="+", default=own_pages())
    parser.add_argument("--honest", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.do == "record":
        record(args.folder, args.model, args.texts, args.seed, args.pages, honest=args.honest)
    elif args.do == "compute":
        compute(args.folder, args.kernel, args.seed, honest=args.honest)
    else:
        print(json.dumps(judge(args.folder, args.positions, args.trials, args.seed), indent=2))


if __name__ == "__main__":
    main()
