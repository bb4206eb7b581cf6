"""Seconds of a training step of four stages on slow lines, by codec and bottleneck, with real processes and p2pd. Prints JSON.

    python contrib/studies/thin_lines.py [--lines 8:40 1000:1 free] [--hidden 1024] [--steps 8] [--curve OUT.jsonl]

A Llama on bytes, random, four stages of one layer, each a process of its own behind a relay: a line is Mbit/s and milliseconds one
way, of each connection by itself (`delaying_relay.py`; `free`: a relay without limits). By default attention and feed-forward are
so narrow that computing is nothing beside the lines, as it is for cards: `--feed-forward` and `--heads` make them as wide as you
like. `step_s` is the median of the steps after `SETTLED_AFTER`. `none` sends float32, `auto` is what the nodes choose themselves.

With `--curve`, the lines that `thin_boundaries.py` wrote, `time` is the seconds to a loss relative to the best codec without a
bottleneck on the same line: step seconds times the steps that the setting needs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import typing
from pathlib import Path
from typing import Any

from thin_boundaries import finished, relative

from swarmnode.localswarm import LocalSwarm

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from delaying_relay import DelayingRelay, free_port

STAGES, SEQUENCE = 4, 128
SETTLED_AFTER = 3  # steps, in which controllers choose
TIMEOUT_S = 900.0
SETTINGS = {
    # name: (hidden / R or 0, codec of the nodes, name in thin_boundaries.py)
    "none": (0, "none", "none"),
    "int8": (0, "int8", "int8"),
    "int4": (0, "int4", "int4"),
    "auto": (0, "auto", None),
    "1/8, int8": (8, "int8", "8x anchor int8"),
    "1/16, int8": (16, "int8", "16x anchor int8"),
}


def save_config(folder: Path, options: argparse.Namespace) -> Path:
    """Save the configuration of the model, and return its folder."""
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.feed_forward, num_hidden_layers=STAGES, vocab_size=256,
        num_attention_heads=options.heads, num_key_value_heads=options.heads, head_dim=64,
        max_position_embeddings=SEQUENCE, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def spans_of(units: int) -> list[str]:
    """Return the spans of the four nodes: a model with a bottleneck has a unit a layer, others one each for both ends besides."""
    cuts = [0, 1, 2, 3, 4] if units == STAGES else [0, 2, 3, 4, units]
    return [f"{first}:{end}" for first, end in itertools.pairwise(cuts)]


def step_seconds(folder: Path, config: Path, relay: DelayingRelay, name: str, options: argparse.Namespace) -> Any:
    """Train a swarm for some steps and return its seconds a step. Raises SystemExit if the trainer fails."""
    divisor, codec, _ = SETTINGS[name]
    narrow = ["--bottleneck", str(options.hidden // divisor), "--stage-layers", "1"] if divisor else []
    with contextlib.ExitStack() as stack:
        local = stack.enter_context(LocalSwarm(folder))
        settings = ["--config", str(config), "--mode", "train", "--open", "--quiet", *narrow]
        local.command("create", str(local.file.with_suffix("")), *settings)
        local.bootstrap()
        nodes = []
        for number, span in enumerate(spans_of(STAGES if divisor else STAGES + 2)):
            port = free_port()
            told = f"/ip4/127.0.0.1/tcp/{relay.to(port)}"
            listens = ["--no-direct", "--host-maddr", f"/ip4/127.0.0.1/tcp/{port}", "--announce-maddr", told]
            nodes.append(local.node(f"node-{number}", "--span", span, "--compress", codec, *listens))
        for node in nodes:
            node.wait_for("ready")
        trainer = local.trainer(
            "trainer", "--log", str(folder / "log"), "--data", typing.__file__, "--steps", str(options.steps),
            "--batch", str(options.batch), "--microbatch", str(options.microbatch), "--sequence", str(SEQUENCE),
            "--checkpoint-steps", "1000",
        )  # fmt: skip
        if trainer.finish(TIMEOUT_S):
            raise SystemExit(f"the trainer failed: {trainer.tail()}")
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    return round(statistics.median(line["step_s"] for line in lines[SETTLED_AFTER:]), 3)


def steps_of(curve: Path | None) -> dict[str, float]:
    """Return the steps to a loss relative to those without compression, by setting of the longest curve; empty without a curve."""
    found = list(relative(finished(curve))) if curve else []
    longest = max((row["tokens"] for _, row in found), default=0)
    return {name: row["steps"] for name, row in found if row["tokens"] == longest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", nargs="+", default=["8:40", "1000:1", "free"], metavar="MBPS:MS")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    for name, default in (("hidden", 1024), ("feed-forward", 64), ("heads", 1), ("steps", 8), ("batch", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--microbatch", type=int, default=2)
    parser.add_argument("--curve", type=Path)
    options = parser.parse_args()
    steps = steps_of(options.curve)
    report: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as named:
        config = save_config(Path(named) / "config", options)
        for line in options.lines:
            mbps, ms = (0.0, 0.0) if line == "free" else map(float, line.split(":"))
            with DelayingRelay(ms / 1000, 1e6 * mbps) as relay:
                for name in options.only:
                    folder = Path(named) / f"{line} {name}".translate(str.maketrans(":/ ,", "----"))
                    folder.mkdir()
                    step_s = step_seconds(folder, config, relay, name, options)
                    found = report.setdefault(line, {})[name] = {"step_s": step_s}
                    if (needed := steps.get(SETTINGS[name][2] or name)) is not None:
                        found["to_a_loss_s"] = round(needed * step_s, 3)
                    print(line, name, found, file=sys.stderr, flush=True)
            whole = [
                one["to_a_loss_s"]
                for name, one in report[line].items()
                if not SETTINGS[name][0] and "to_a_loss_s" in one
            ]
            for one in report[line].values():
                if whole and "to_a_loss_s" in one:
                    one["time"] = round(one["to_a_loss_s"] / min(whole), 3)
    settings = {name: str(value) for name, value in vars(options).items()}
    print(json.dumps({"settings": settings, "lines": report}, indent=1))


if __name__ == "__main__":
    main()
