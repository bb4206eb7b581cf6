"""Peak memory and speed of a training stage against what it must hold. Prints JSON.

    OMP_NUM_THREADS=1 python contrib/benchmarks/training_memory.py [--in-flight 4] [--microbatch 4] [--layers 8]

The model is GPT-2-like (hidden 512, sequence 128). `budget_mb` counts parameters, gradients, the two moments of AdamW and what K
microbatches in flight bring in; `peak_mb` is the growth of the process's resident memory at its highest, over that of
a process that has trained a tiny model. Stages: the first half of the units, the second half, and the whole; each in a
process of its own, which keeps graphs, or computes them again and gives freed memory back to the system.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

HIDDEN, HEADS, SEQUENCE, VOCABULARY = 512, 8, 128, 1024
MICROBATCHES, STEPS = 8, 3


def make_checkpoint(folder: Path, layers: int, hidden: int) -> None:
    """Save a random GPT-2 without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = GPT2Config(
        n_embd=hidden,
        n_layer=layers,
        n_head=HEADS,
        n_positions=SEQUENCE,
        vocab_size=VOCABULARY,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)


def memory_mb(field: str) -> float:
    """Return a field of /proc/self/status in MiB: VmRSS is resident now, VmHWM the peak."""
    status = Path("/proc/self/status").read_text()
    return float(status.split(f"{field}:")[1].split()[0]) / 1024


def train_stage(
    checkpoint: Path, start: int, end: int, *, microbatch: int, in_flight: int, recompute: bool
) -> tuple[Any, float]:
    """Train some steps with `in_flight` microbatches under way at any time. Returns the learner and seconds per step."""
    import torch

    from swarmnode.compute.model.checkpoint import Checkpoint
    from swarmnode.compute.training.learner import Learner
    from swarmnode.compute.training.lm import load_segment
    from swarmnode.swarm.records.run import Run

    batch = MICROBATCHES * microbatch
    run = Run(data=bytes(32), steps=STEPS, batch=batch, microbatch=microbatch, sequence=SEQUENCE)
    segment = load_segment(Checkpoint(checkpoint), start, end)
    learner = Learner(segment, run, recompute=recompute)
    ids_BT = torch.randint(0, VOCABULARY, (microbatch, SEQUENCE))
    hidden = segment.span.hidden_size
    ended = end == segment.units

    def forward(index: int) -> tuple[int, ...]:
        values = (ids_BT.clone(),) if start == 0 else (torch.randn(microbatch, SEQUENCE, hidden),)
        return tuple(learner.forward(index, index, start, end, values, (ids_BT,))[0].shape)

    begin_s = time.perf_counter()
    for _ in range(STEPS):
        waiting: list[tuple[int, tuple[int, ...]]] = []
        for index in range(MICROBATCHES + in_flight):
            if index < MICROBATCHES:
                waiting.append((index, forward(index)))
            if waiting and (ended or index >= in_flight - 1):
                lease, shape = waiting.pop(0)
                learner.backward(lease, () if ended else (torch.randn(shape) * 1e-3,))
        learner.commit({}, learner.squared_norm(learner.blocks) ** 0.5)
    return learner, (time.perf_counter() - begin_s) / STEPS


def measure(checkpoint: Path, tiny: Path, start: int, end: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one stage in this process."""
    import torch

    from swarmnode.training.worker.memory import give_back_large_tensors

    torch.set_num_threads(1)
    if options.recompute:
        give_back_large_tensors()
    settings = {"microbatch": options.microbatch, "in_flight": options.in_flight, "recompute": options.recompute}
    train_stage(tiny, 0, 3, **settings)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM)
    before_mb = memory_mb("VmRSS")
    learner, step_s = train_stage(checkpoint, start, end, **settings)
    peak_mb = memory_mb("VmHWM") - before_mb
    parameters = sum(p.numel() for named in learner.segment.parameters().values() for p in named.values())
    tokens = options.microbatch * SEQUENCE
    input_bytes = tokens * 8 + (tokens * HIDDEN * 4 if start > 0 else 0)
    in_flight = 1 if end == learner.segment.units else options.in_flight
    budget_mb = (parameters * 16 + in_flight * input_bytes) / 2**20
    return {
        "units": [start, end],
        "recompute": options.recompute,
        "peak_mb": round(peak_mb, 1),
        "budget_mb": round(budget_mb, 1),
        "ratio": round(peak_mb / budget_mb, 3),
        "tokens_per_s": round(MICROBATCHES * tokens / step_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--recompute", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stage", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage is not None:
        checkpoint, tiny, start, end = options.stage
        print(json.dumps(measure(Path(checkpoint), Path(tiny), int(start), int(end), options)))
        return
    units = options.layers + 2
    results = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, tiny = Path(folder, "model"), Path(folder, "tiny")
        make_checkpoint(checkpoint, options.layers, HIDDEN)
        make_checkpoint(tiny, 1, 32)
        sizes = [f"--microbatch={options.microbatch}", f"--in-flight={options.in_flight}"]
        for start, end in ((0, units // 2), (units // 2, units), (0, units)):
            for recompute in ([], ["--recompute"]):
                stage = ["--stage", str(checkpoint), str(tiny), str(start), str(end)]
                command = [sys.executable, __file__, *sizes, *recompute, *stage]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                results.append(json.loads(done.stdout))
    print(json.dumps({"in_flight": options.in_flight, "microbatch": options.microbatch, "stages": results}, indent=2))


if __name__ == "__main__":
    main()
