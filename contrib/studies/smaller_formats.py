"""Peers that compute from a smaller format of packed weights, against honest noise of fast and exact products.

    python contrib/studies/smaller_formats.py record FOLDER --model GGUF [--liar GGUF …] [--texts 16] [--seed 1]
    python contrib/studies/smaller_formats.py judge FOLDER [--positions 100000] [--trials 100] [--seed 1]

`record` computes the same texts with fast products once for each of these kinds of machines: this one, others whose vector
instructions are older, one with torch's own attention, and three whose norms are off by a random 1e-7 of each value. All of these
add floats in another order, or look as if they did. It computes them with exact products in one pass and in steps, and with each
liar's file. `swarmnode quantize --allow-requantize` makes such files. The states that each hop sends on are kept in FOLDER.

`judge` draws from these records again and again, sketches them by fresh seeds, and compares them by the code that clients run. It
counts false alarms for pairs of honest runs, and the positions that an audit needs to find a liar. Prints JSON.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the line above: it reads OMP_NUM_THREADS when it is imported
from small_lies import (
    KERNELS,
    LENGTH,
    PROMPT,
    PROMPT_POSITION_S,
    STEP_S,
    Pipeline,
    Records,
    arguments,
    false_alarms,
    hops_of,
    judge_lie,
    own_pages,
    texts_of,
)
from torch import Tensor, nn

from swarmnode.audits.audit_case import Comparison, TextRun, compare
from swarmnode.codec.audit_messages import SEED_BYTES
from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode, encode
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner
from swarmnode.compute.serving.sketch import deviations, sketch
from swarmnode.config import EXACT, FAST, INT8_KV, PLAIN
from swarmnode.founding.model_source import open_model
from swarmnode.plan.audits import AuditBudget, Calibration, cost_of
from swarmnode.plan.findings import are_too_many
from swarmnode.tolerances import TABLE_UNITS

FORMATS = {"packed": (FAST, PLAIN), "packed+kv8": (FAST, INT8_KV), "float32": (EXACT, PLAIN)}
"""Number formats that nodes announce, each with its products and its KV cache"""

ATTENTION, NOISE, SERVED = "attention", "noise", "served"
MACHINES = {
    "packed": ("own", ATTENTION, *(f"{NOISE}{seed}" for seed in (1, 2, 3)), SERVED, "old"),
    "float32": ("own", "old"),
    "packed+kv8": ("own", ATTENTION, f"{NOISE}1", "old"),
}
"""Kinds of machines by number format; `served` is this one, which decodes step by step"""

NOISE_SIZE = 1e-7  # of a value
MEAN_TRUST = 2 / 3  # trust at which a peer is audited at the mean share
MOST_TOKENS = 2000  # of a liar until it must be found


class PackedPipeline(Pipeline):
    """Three hops with packed weights, computing as the machine `machine` does."""

    def __init__(self, checkpoint: Checkpoint, number_format: str, machine: str) -> None:
        products, self._kv = FORMATS[number_format]
        self.dtype, self.adapter = torch.float32, ""
        hops = hops_of(checkpoint.family.units)
        self.spans = [load_span(checkpoint, *hop, dtype=self.dtype, products=products) for hop in hops]
        for span in self.spans:
            if machine == ATTENTION:
                span.model.config._attn_implementation = "sdpa"
            elif machine.startswith(NOISE):
                add_noise(span.model, int(machine.removeprefix(NOISE)))

    def runners(self) -> list[StageRunner]:
        return [StageRunner(span, RunnerConfig(cache_bytes=1 << 31, kv=self._kv)) for span in self.spans]


def add_noise(model: nn.Module, seed: int) -> None:
    """Multiply each value that a norm returns by a random number within some NOISE_SIZE of 1."""
    generator = torch.Generator().manual_seed(seed)

    def off(_norm: nn.Module, _inputs: Any, y: Tensor) -> Tensor:
        return y * (1 + NOISE_SIZE * torch.randn(y.shape, generator=generator))

    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.register_forward_hook(off)


# -- recording


def record(folder: Path, model: str, liars: Sequence[str], texts: int, seed: int) -> None:
    """Record every run, one process after another; runs that `folder` has are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"honest": model, **{Path(liar).stem: liar for liar in liars}}
    checkpoints = {name: open_model(path, folder / name, packs=True, force=True) for name, path in paths.items()}
    if not (folder / "ids.pt").exists():
        ids_ST = texts_of(checkpoints["honest"], texts, seed, own_pages())
        torch.save({"checkpoint": str(checkpoints["honest"].path), "ids_ST": ids_ST}, folder / "ids.pt")
    for kernel in ("own", "old"):
        command = [sys.executable, __file__, "compute", str(folder), "--kernel", kernel]
        command += ["--liar", *map(str, liars)] if liars and kernel == "own" else []
        subprocess.run(command, env={**os.environ, **KERNELS[kernel]}, check=True)


def path_of(folder: Path, name: str, number_format: str, machine: str) -> Path:
    return folder / f"{number_format}.{machine if name == 'honest' else name}.pt"


def compute(folder: Path, kernel: str, liars: Sequence[str]) -> None:
    """Compute all runs of the machines that have this process's kernels, and those of the liars."""
    for number_format, machines in MACHINES.items():
        for machine in machines:
            if (machine == "old") == (kernel == "old"):
                run(folder, "honest", number_format, machine)
        for liar in liars:
            run(folder, Path(liar).stem, number_format, "own")


def run(folder: Path, name: str, number_format: str, machine: str) -> None:
    """Compute all texts, and save the states in `folder`, unless they are there."""
    path, began_s = path_of(folder, name, number_format, machine), time.process_time()
    if path.exists():
        return
    pipeline = PackedPipeline(Checkpoint(folder / name), number_format, machine)
    torch.save(pipeline.compute(torch.load(folder / "ids.pt")["ids_ST"], served=machine == SERVED), path)
    print(
        f"{name} {number_format} {machine}: {time.process_time() - began_s:.0f} s of CPU", file=sys.stderr, flush=True
    )


# -- judging


class PackedRecords(Records):
    """Recordings in one number format: `honest` by the kind of machine, `lies` by the liar's file. States went through `codec`."""

    def __init__(self, folder: Path, number_format: str, codec: Codec = Codec.NONE) -> None:
        self.number_format, self.adapted, self.codec = number_format, False, codec
        self._folder = folder
        runs = {path.name.split(".")[-2]: path for path in sorted(folder.glob(f"{number_format}.*.pt"))}
        machines = MACHINES[number_format]
        self.honest = {name: self._coded(path) for name, path in runs.items() if name in machines}
        self.lies = {name: self._coded(path) for name, path in runs.items() if name not in machines}
        self.texts = len(self.honest["own"]["drawn_ST"])

    def _coded(self, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(path)
        return {**found, "hidden": [decode(*encode(hidden_STH, self.codec)) for hidden_STH in found["hidden"]]}

    def compare(self, one: TextRun, other: TextRun, calibration: Calibration) -> Comparison:
        return compare(one, other, lambda _unit: self.codec, calibration)

    def deviations(self) -> dict[str, Any]:
        """Return the median and the largest deviations of each hop, over a hop of TABLE_UNITS layers, of each pair of machines and
        of each liar from each machine."""
        dice, named = random.Random(1), itertools.combinations(self.honest.items(), 2)
        pairs = [*named, *itertools.product(self.lies.items(), self.honest.items())]
        return {f"{one} {two}": self._apart(first, second, dice) for (one, first), (two, second) in pairs}

    def _apart(self, first: dict[str, Any], second: dict[str, Any], dice: random.Random) -> dict[str, Any]:
        result: dict[str, Any] = {"other_tokens": float((first["drawn_ST"] != second["drawn_ST"]).float().mean())}
        for index, (_, units) in enumerate(self.hops[:-1]):
            seed = dice.randbytes(SEED_BYTES)
            sketches = (sketch(found["hidden"][index].flatten(0, 1), seed) for found in (first, second))
            apart = sorted(each / math.sqrt(units / TABLE_UNITS) for each in deviations(*sketches))
            result[f"hop {index}"] = [float(f"{apart[int(at * (len(apart) - 1))]:.2g}") for at in (0.01, 0.5, 0.99, 1)]
        return result


def tokens_until_out(records: PackedRecords, liar: str, dice: random.Random) -> int:
    """Return the tokens that a liar of mean trust has made until it is found; more than MOST_TOKENS if it is not."""
    budget, calibration, near_misses, audited, made = AuditBudget(), Calibration(), 0, 0, 0
    cost = cost_of(PROMPT, LENGTH - PROMPT, decode_s=STEP_S, prefill_s=PROMPT_POSITION_S)
    while made <= MOST_TOKENS:
        made += LENGTH - PROMPT
        if dice.random() >= budget.chance(cost, MEAN_TRUST):
            continue
        budget.spend(cost)
        audited += LENGTH
        verdict = judge_lie(records, liar, calibration, dice)
        near_misses += verdict == "near"
        if verdict == "false" or (verdict == "near" and are_too_many(near_misses, audited)):
            break
    return made


def judge(folder: Path, positions: int, trials: int, seed: int) -> dict[str, Any]:
    """Return false alarms, and the tokens until the liars are found, by number format and codec."""
    dice, results = random.Random(seed), {}
    for number_format, codec in itertools.product(MACHINES, (Codec.NONE, Codec.INT8, Codec.INT4)):
        records = PackedRecords(folder, number_format, codec)
        share = positions // (len(MACHINES) * 3)
        computed = records.texts * LENGTH * len(records.honest)
        result = {"computed_positions": computed, "honest": false_alarms(records, share, dice)}
        for liar in records.lies:
            tokens = sorted(tokens_until_out(records, liar, dice) for _ in range(trials))
            found = sum(made <= MOST_TOKENS for made in tokens)
            result[liar] = {
                "found": found,
                "of": trials,
                "tokens_median": tokens[trials // 2],
                "tokens_most": tokens[-1],
            }
        results[f"{number_format} {codec.name}"] = result | {"deviations": records.deviations()}
    return results


def main() -> None:
    parser = arguments(__doc__, texts=16, positions=100_000)
    parser.add_argument("--liar", nargs="+", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.do == "record":
        record(args.folder, args.model, args.liar, args.texts, args.seed)
    elif args.do == "compute":
        compute(args.folder, args.kernel, args.liar)
    else:
        print(json.dumps(judge(args.folder, args.positions, args.trials, args.seed)))


if __name__ == "__main__":
    main()
