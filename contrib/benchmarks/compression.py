"""Gain of compression between stages on slow links, and its cost in loss. Prints JSON.

    python contrib/benchmarks/compression.py [--rates 8 50 500] [--steps 5] [--loss-steps 300]

Three stages of a byte-level GPT-2, real processes on loopback whose uplinks are paced (Mbit/s). `step_s` is the median of the steps
after the controllers have settled; `speedup` is against `--compress none` at the same rate in the same run. Then, unpaced,
the loss after `--loss-steps` steps of a narrower model whose boundaries travel in one codec throughout: mean of the last 20 steps,
relative to none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import typing
from pathlib import Path
from typing import Any

from swarmnode.localswarm import LocalSwarm

SPANS = ("0:2", "2:3", "3:5")
TIMEOUT_S = 1800.0
SETTLED_AFTER = 2  # steps


def make_checkpoint(folder: Path, hidden: int, layers: int, sequence: int) -> Path:
    """Save a random GPT-2 on bytes, and return its folder."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=hidden, n_layer=layers, n_head=4, n_positions=sequence, vocab_size=256, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def train(model: Path, folder: Path, node: list[str], settings: list[str], spans: tuple[str, ...] = SPANS) -> Any:
    """Train one swarm and return its steps and the codecs that its nodes chose. Raises SystemExit if the trainer fails."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        local = stack.enter_context(LocalSwarm(folder))
        local.create(model, "--mode", "train")
        local.bootstrap()
        nodes = [local.node(f"node-{number}", "--span", span, *node) for number, span in enumerate(spans)]
        for member in nodes:
            member.wait_for("ready")
        trainer = local.trainer("trainer", "--log", str(folder / "log"), *settings)
        if trainer.finish(TIMEOUT_S):
            raise SystemExit(f"the trainer failed: {trainer.tail()}")
        local.stop()
        for member in nodes:
            with contextlib.suppress(Exception):
                member.wait_for("left")
        chosen = sorted(
            f"{event['direction']} {event['codec']}"
            for member in nodes
            for event in member.seen
            if event.get("event") == "compressing"
        )
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()], chosen


def measure_speed(folder: Path, rates: list[float], steps: int) -> dict[str, Any]:
    """Return step seconds by rate and mode."""
    model = make_checkpoint(folder / "wide", 256, 3, 128)
    settings = [
        "--data", typing.__file__, "--steps", str(steps), "--batch", "48", "--microbatch", "8", "--sequence", "128",
        "--checkpoint-steps", "1000",
    ]  # fmt: skip
    report: dict[str, Any] = {}
    for rate in rates:
        measured: dict[str, Any] = {}
        for mode in ("none", "auto", "adatopk"):
            node = ["--compress", mode, "--max-upload", f"{rate}Mbit"]
            lines, chosen = train(model, folder / f"{rate}-{mode}", node, settings)
            measured[mode] = {"step_s": round(statistics.median(line["step_s"] for line in lines[SETTLED_AFTER:]), 3)}
            if chosen:
                measured[mode]["chosen"] = chosen
        for mode in ("auto", "adatopk"):
            measured[mode]["speedup"] = round(measured["none"]["step_s"] / measured[mode]["step_s"], 2)
        report[f"{rate:g} Mbit/s"] = measured
    return report


def measure_loss(folder: Path, steps: int) -> dict[str, Any]:
    """Return the mean loss of the last 20 steps by codec, plain and relative to none."""
    model = make_checkpoint(folder / "narrow", 96, 3, 64)
    settings = [
        "--data", typing.__file__, "--steps", str(steps), "--batch", "8", "--microbatch", "4", "--sequence", "64",
        "--lr", "2e-3", "--warmup", "20", "--checkpoint-steps", "1000",
    ]  # fmt: skip
    report: dict[str, Any] = {}
    for mode in ("none", "int8", "int4", "adatopk"):
        lines, _ = train(model, folder / f"loss-{mode}", ["--compress", mode], settings)
        loss = statistics.mean(line["loss"] for line in lines[-20:])
        report[mode] = {"loss": round(loss, 4), "relative": round(loss / report.get("none", {"loss": loss})["loss"], 4)}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[8, 50, 500])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--loss-steps", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        speed = measure_speed(Path(name), options.rates, options.steps) if options.rates else {}
        loss = measure_loss(Path(name), options.loss_steps) if options.loss_steps else {}
    print(json.dumps({"settings": vars(options), "speed": speed, "loss": loss}, indent=2))


if __name__ == "__main__":
    main()
