"""Cost in training loss of compressing hidden states and their gradients. Prints JSON; 4 minutes on one core.

    python contrib/benchmarks/compression_loss.py [--steps 300] [--batch 16] [--seeds 1]

A GPT-2 of 4 layers, 96 wide, on bytes of the standard library's sources, sequence 64, in three segments in one process. What
crosses their two boundaries is encoded and decoded, there and back. Every pair of codecs (forward / backward) starts from the
same weights and sees the same batches; a loss is the mean over the last 20 steps. `bytes_ratio` counts both directions.
AdaTopK keeps a tenth everywhere here, as it does where all links are equally slow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from corpus import batches, read_corpus
from torch import Tensor

from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode_values, encode_values
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.lm import SpanSegment, load_segment

LAYERS, HIDDEN, SEQUENCE = 4, 96, 64
SPANS = ((0, 2), (2, 4), (4, 6))
LEARNING_RATE, WARMUP_STEPS, LARGEST_NORM = 2e-3, 20, 1.0
LAST_STEPS = 20


@dataclass
class Boundary:
    """Boundary between two segments: its codecs, and the bytes that crossed."""

    forward: Codec = Codec.NONE
    backward: Codec = Codec.NONE
    keep: float = 1.0  # of top-k
    sent_bytes: int = field(default=0, init=False)

    def cross(self, values: tuple[Tensor, ...], codec: Codec) -> tuple[Tensor, ...]:
        """Encode and decode `values` by `codec`, and return them as they arrive; their bytes are counted."""
        infos, payloads = encode_values(values, codec, self.keep)
        payload = b"".join(payloads)
        self.sent_bytes += len(payload)
        return decode_values(infos, payload, "cpu")


PAIRS = {
    "none": Boundary(),
    "bf16 / bf16": Boundary(Codec.BF16, Codec.BF16),
    "int8 / int8": Boundary(Codec.INT8, Codec.INT8),
    "int4 / int8": Boundary(Codec.INT4, Codec.INT8),
    "int4 / int4": Boundary(Codec.INT4, Codec.INT4),
    "AdaTopK, ratio 10": Boundary(Codec.TOPK, Codec.TOPK, keep=1 / 10),
}


def make_checkpoint(folder: Path, seed: int) -> Checkpoint:
    """Save a random GPT-2 on bytes. Its head is untied: with a tied one the first and the last segment would share it."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = GPT2Config(
        n_embd=HIDDEN, n_layer=LAYERS, n_head=4, n_positions=SEQUENCE, vocab_size=256, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    return Checkpoint(folder)


def run_microbatch(segments: list[SpanSegment], ids_BT: Tensor, seed: int, boundary: Boundary) -> float:
    """Run forward through all segments and back, and return the loss. The gradients stay in the parameters."""
    values: tuple[Tensor, ...] = (ids_BT,)
    entered: list[Tensor] = []
    left: list[Tensor] = []
    for segment in segments:
        if entered or left:
            values = boundary.cross(tuple(value.detach() for value in values), boundary.forward)
            entered.append(values[0].requires_grad_(True))
        values = segment.forward(values, segment.start, segment.end, seed, (ids_BT,))
        left.append(values[0])
    loss = left.pop()
    loss.backward()
    for output, arrived in zip(reversed(left), reversed(entered), strict=True):
        assert arrived.grad is not None
        (gradient,) = boundary.cross((arrived.grad,), boundary.backward)
        output.backward(gradient)
    return loss.item()


def train(
    checkpoint: Checkpoint, boundary: Boundary, corpus_N: Tensor, options: argparse.Namespace, seed: int
) -> float:
    """Train with this boundary, and return the mean loss of the last steps."""
    segments = [load_segment(checkpoint, *span) for span in SPANS]
    parameters = [
        parameter for segment in segments for block in segment.parameters().values() for parameter in block.values()
    ]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    losses: list[float] = []
    for step, ids_BT in enumerate(islice(batches(corpus_N, options.batch, SEQUENCE, seed), options.steps)):
        optimizer.zero_grad()
        losses.append(run_microbatch(segments, ids_BT, step, boundary))
        torch.nn.utils.clip_grad_norm_(parameters, LARGEST_NORM)
        optimizer.step()
        warmup.step()
    return statistics.mean(losses[-LAST_STEPS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("steps", 300), ("batch", 16), ("seeds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus_N = read_corpus()
    losses: dict[str, list[float]] = {name: [] for name in PAIRS}
    began_s = time.perf_counter()
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as folder:
            checkpoint = make_checkpoint(Path(folder), seed)
            for name, boundary in PAIRS.items():
                losses[name].append(train(checkpoint, boundary, corpus_N, options, seed))
                print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", file=sys.stderr)
    plain = statistics.mean(losses["none"])
    report = {
        name: {
            "loss": round(statistics.mean(losses[name]), 4),
            "more_loss": round(statistics.mean(losses[name]) - plain, 4),
            "relative": round(statistics.mean(losses[name]) / plain, 4),
            "more_loss_by_seed": [round(mine - its, 4) for mine, its in zip(losses[name], losses["none"], strict=True)],
            "bytes_ratio": round(PAIRS["none"].sent_bytes / boundary.sent_bytes, 2),
        }
        for name, boundary in PAIRS.items()
    }
    seconds = round(time.perf_counter() - began_s, 1)
    print(json.dumps({"settings": vars(options), "seconds": seconds, "forward / backward": report}, indent=2))


if __name__ == "__main__":
    main()
