"""Bytes that replicas send to average, and their cost in loss. Prints JSON.

    python contrib/benchmarks/averaging.py [--steps 400] [--hidden 96]

Two replicas of a small byte-level GPT-2, real processes on loopback, trained on the standard library in every way that a run may
ask for. `loss` is the mean of the last 20 steps; `bytes_per_step` is what crosses between the two for this model's tensors,
by the exchange itself, after the warm-up of 100 steps (DiLoCo averages every step until then).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import typing
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # replicas in one process belong to the tests

from swarmnode.localswarm import LocalSwarm

TIMEOUT_S = 900.0
LAYERS, SEQUENCE, WARMUP_STEPS = 2, 64, 100
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {"codec": "fp16"},
    "int8": {"codec": "int8"},
    "int4": {"codec": "int4"},
    "top-k 5 %": {"codec": "topk"},
    "PowerSGD 4": {"rank": 4},
    "DiLoCo 50": {"every": 50},
    "DiLoCo 50 int8": {"every": 50, "codec": "int8"},
}


def make_checkpoint(folder: Path, hidden: int) -> Any:
    """Save a random GPT-2 on bytes, and return the model."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=hidden,
        n_layer=LAYERS,
        n_head=4,
        n_positions=SEQUENCE,
        vocab_size=256,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    model = GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    return model


def crossed_bytes(model: Any, way: dict[str, Any]) -> float:
    """Return the bytes that cross between two replicas per step, for tensors of the model's shapes averaged in this way."""
    import torch

    from swarmnode.codec.tensors import Codec
    from swarmnode.compute.training.averaging.gradient_compressor import make_gradient_compressor
    from swarmnode.swarm.records.run import Averaging
    from tests.compute.training.averaging.together import agree

    averaging = Averaging(codec=Codec[way.get("codec", "none").upper()], rank=way.get("rank", 0))
    shapes = [parameter.shape for parameter in model.parameters()]
    length = sum(shape.numel() for shape in shapes)
    exchanges = [make_gradient_compressor(averaging, shapes) for _ in range(2)]
    _, crossed = agree(exchanges, [torch.randn(length) for _ in exchanges], [0.5, 0.5])
    return crossed / float(way.get("every", 1))


def train(model: Path, units: int, folder: Path, steps: int, way: dict[str, Any]) -> float:
    """Train one swarm in this way and return the mean loss of the last 20 steps. Raises SystemExit if the trainer fails."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        local = stack.enter_context(LocalSwarm(folder))
        local.create(model, "--mode", "train")
        local.bootstrap()
        for member in [local.node(f"node-{number}", "--span", f"0:{units}") for number in range(2)]:
            member.wait_for("ready")
        settings = {
            "data": typing.__file__, "steps": steps, "batch": 16, "microbatch": 4, "sequence": SEQUENCE, "lr": 2e-3,
            "warmup": WARMUP_STEPS, "checkpoint-steps": 10_000, "log": folder / "log",
        } | {f"average-{name}": value for name, value in way.items()}  # fmt: skip
        trainer = local.trainer(
            "trainer", *(word for name, value in settings.items() for word in (f"--{name}", str(value)))
        )
        if trainer.finish(TIMEOUT_S):
            raise SystemExit(f"the trainer failed: {trainer.tail()}")
    losses = [json.loads(line)["loss"] for line in (folder / "log").read_text().splitlines()]
    return statistics.mean(losses[-20:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--hidden", type=int, default=96)
    options = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        model = make_checkpoint(Path(name) / "model", options.hidden)
        for label, way in WAYS.items():
            folder = Path(name) / label.replace(" ", "-").replace("%", "percent")
            loss = train(Path(name) / "model", LAYERS + 2, folder, options.steps, way)
            size = crossed_bytes(model, way)
            first = report.get("none", {"loss": loss, "bytes_per_step": size})
            report[label] = {
                "loss": round(loss, 4),
                "relative_loss": round(loss / first["loss"], 4),
                "bytes_per_step": round(size),
                "fewer_bytes": round(first["bytes_per_step"] / size, 1),
            }
    print(json.dumps({"settings": vars(options), "ways": report}, indent=2))


if __name__ == "__main__":
    main()
