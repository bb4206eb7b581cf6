"""Bytes that replicas send to average, against the loss after equal tokens: every codec and factor in one process. Prints JSON.

    python contrib/benchmarks/averaging_loss.py [--steps 300] [--every 25] [--ways none int8 …] [--seed 0]

Two replicas of a byte-level GPT-2 (2 layers, 96 wide, sequence 64, 8 samples each) learn the standard library's sources. Gradients
and pseudo-gradients go through the compressors that live replicas use (`tests/compute/training/averaging/together.py`), encoded and
decoded. With `every` above 1 replicas part after 100 steps of warm-up, as live ones do. `loss` is the mean of the last 20 steps,
`held_out` that of the averaged model on text that was not learnt; `bytes` is what one of the two sends in a step, on average after
the warm-up. `step_s` adds to a step's computing, measured here, what these bytes take at 8, 50 and 500 Mbit/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from corpus import batches, read_corpus
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2]))  # replicas in one process belong to the tests

from swarmnode.codec.tensors import Codec
from swarmnode.compute.training.averaging.gradient_compressor import make_gradient_compressor
from swarmnode.compute.training.block import OuterOptimizer
from swarmnode.swarm.records.run import Averaging
from tests.compute.training.averaging.together import agree

LAYERS, HIDDEN, SEQUENCE, SAMPLES = 2, 96, 64, 8
LEARNING_RATE, LARGEST_NORM, WARMUP_STEPS, LAST_STEPS = 2e-3, 1.0, 100, 20
RATES_MBPS = (8, 50, 500)
REPLICAS = 2


def sparseloco(every: int, keep: float) -> Averaging:
    """Return the averaging that `--average-codec topk2` selects."""
    return Averaging(every=every, codec=Codec.TOPK2, keep=keep, outer_momentum=0.0)


def ways(every: int) -> dict[str, Averaging]:
    """Return the ways of averaging by name."""
    return {
        "none": Averaging(),
        "fp16": Averaging(codec=Codec.FP16),
        "int8": Averaging(codec=Codec.INT8),
        "int4": Averaging(codec=Codec.INT4),
        "top-k 5 %": Averaging(codec=Codec.TOPK),
        "top-k 2 bits 2 %": Averaging(codec=Codec.TOPK2, keep=0.02),
        "PowerSGD 4": Averaging(rank=4),
        "ACP-SGD 4": Averaging(rank=4, alternating=True),
        f"DiLoCo {every}": Averaging(every=every),
        f"DiLoCo {every} int8": Averaging(every=every, codec=Codec.INT8),
        **{f"SparseLoCo {every} {share} %": sparseloco(every, share / 100) for share in (10, 3, 1)},
    }


@dataclass
class Replica:
    """A model and its own optimiser."""

    model: Any
    optimizer: torch.optim.Optimizer

    @classmethod
    def make(cls, seed: int) -> Replica:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(seed)
        config = GPT2Config(
            n_embd=HIDDEN, n_layer=LAYERS, n_head=4, n_positions=SEQUENCE, vocab_size=256, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model: Any = GPT2LMHeadModel(config)
        return cls(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the model's parameters in their order."""
        return list(self.model.parameters())

    def learn(self, ids_BT: Tensor) -> tuple[float, Tensor]:
        """Return the loss of a batch, and its gradient_N."""
        self.optimizer.zero_grad()
        loss = self.model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        return loss.item(), torch.cat([value.grad.view(-1) for value in self.parameters])

    def update(self, gradient_N: Tensor, step: int) -> None:
        """Take one step of AdamW with this gradient, clipped to `LARGEST_NORM`."""
        pieces = torch.split(gradient_N, [value.numel() for value in self.parameters])
        for value, piece in zip(self.parameters, pieces, strict=True):
            value.grad = piece.view_as(value).clone()
        nn.utils.clip_grad_norm_(self.parameters, LARGEST_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        self.optimizer.step()

    def values(self) -> Tensor:
        """Return a copy of all parameters, values_N."""
        return torch.cat([value.detach().view(-1) for value in self.parameters])

    def load(self, values_N: Tensor) -> None:
        """Set the replica's parameters to `values_N`."""
        pieces = torch.split(values_N, [value.numel() for value in self.parameters])
        with torch.no_grad():
            for value, piece in zip(self.parameters, pieces, strict=True):
                value.copy_(piece.view_as(value))


class Replicas:
    """Pair of replicas that average as a run asks."""

    def __init__(self, averaging: Averaging, seed: int) -> None:
        self.members = [Replica.make(seed) for _ in range(REPLICAS)]
        self.sent_bytes: list[int] = []  # by one of them, of each step
        self._averaging = averaging
        shapes = [value.shape for value in self.members[0].parameters]
        self._compressors = [make_gradient_compressor(averaging, shapes) for _ in self.members]
        self._outer: list[OuterOptimizer] = []
        self._has_agreed = False

    def step(self, number: int, ids_BT: Tensor) -> float:
        """Train one step and return the mean loss of the replicas."""
        learnt = [one.learn(ids) for one, ids in zip(self.members, ids_BT.chunk(REPLICAS), strict=True)]
        apart = self._averaging.every > 1 and number >= WARMUP_STEPS
        gradients = [gradient_N for _, gradient_N in learnt]
        self.sent_bytes.append(0)
        if self._averaging.every == 1:
            gradients = self._agree(gradients)
        elif not apart:
            gradients = [torch.stack(gradients).mean(0)] * REPLICAS
        if apart and not self._outer:
            values_N = self.members[0].values()
            self._outer = [OuterOptimizer(values_N.clone(), len(values_N), self._averaging) for _ in self.members]
        for one, gradient_N in zip(self.members, gradients, strict=True):
            one.update(gradient_N, number)
        if apart and (number + 1) % self._averaging.every == 0:
            self._average()
        return statistics.mean(loss for loss, _ in learnt)

    def _average(self) -> None:
        """Average the replicas' changes of parameters since the last averaging, and take a step of the outer optimizer with the
        mean."""
        means = self._agree([outer.way(one.values()) for outer, one in zip(self._outer, self.members, strict=True)])
        for one, outer, mean_N in zip(self.members, self._outer, means, strict=True):
            one.load(outer.update(mean_N))

    def _agree(self, vectors: list[Tensor]) -> list[Tensor]:
        halves = [vector_N / REPLICAS for vector_N in vectors]
        totals, crossed_bytes = agree(self._compressors, halves, [0.5, 0.5], warm_start=self._has_agreed)
        self._has_agreed = True
        for compressor in self._compressors:
            compressor.accept()
        self.sent_bytes[-1] = crossed_bytes // REPLICAS
        return totals


def measure(averaging: Averaging, corpus_N: Tensor, unseen_BT: Tensor, options: argparse.Namespace) -> dict[str, float]:
    replicas = Replicas(averaging, options.seed)
    losses, seconds = [], []
    for number, ids_BT in enumerate(
        islice(batches(corpus_N, REPLICAS * SAMPLES, SEQUENCE, options.seed), options.steps)
    ):
        began_s = time.thread_time()
        losses.append(replicas.step(number, ids_BT))
        seconds.append((time.thread_time() - began_s) / REPLICAS)  # they compute side by side
    with torch.no_grad():
        held_out = replicas.members[0].model(input_ids=unseen_BT, labels=unseen_BT).loss.item()
    return {
        "loss": statistics.mean(losses[-LAST_STEPS:]),
        "held_out": held_out,
        "bytes": statistics.mean(replicas.sent_bytes[WARMUP_STEPS:]),
        "compute_s": statistics.median(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 300), ("every", 25), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ways", nargs="+", help="none is always among them")
    options = parser.parse_args()
    if options.steps < WARMUP_STEPS + options.every or (options.steps - WARMUP_STEPS) % options.every:
        parser.error(f"--steps is {WARMUP_STEPS} of warm-up and a multiple of --every, so that the run ends averaged")
    known = ways(options.every)
    chosen = {"none": known["none"], **{name: known[name] for name in options.ways or known if name in known}}
    torch.set_num_threads(1)
    corpus_N = read_corpus()
    split = len(corpus_N) * 9 // 10
    unseen_BT = next(iter(batches(corpus_N[split:], 64, SEQUENCE, 1)))
    report: dict[str, dict[str, Any]] = {}
    for name, averaging in chosen.items():
        found = measure(averaging, corpus_N[:split], unseen_BT, options)
        plain = report.get("none", {"loss": found["loss"], "held_out": found["held_out"], "bytes": found["bytes"]})
        report[name] = {
            "loss": round(found["loss"], 4),
            "relative": round(found["loss"] / plain["loss"], 4),
            "held_out": round(found["held_out"], 4),
            "held_out_relative": round(found["held_out"] / plain["held_out"], 4),
            "bytes": round(found["bytes"]),
            "fewer_bytes": round(plain["bytes"] / found["bytes"], 1),
            "step_s": {rate: round(found["compute_s"] + found["bytes"] * 8 / (rate * 1e6), 3) for rate in RATES_MBPS},
        }
        print(name, json.dumps(report[name]), file=sys.stderr)
    print(json.dumps({"settings": vars(options), "ways": report}, indent=2))


if __name__ == "__main__":
    main()
