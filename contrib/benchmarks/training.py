"""Tokens per second of small training swarms against one process with one thread. Prints JSON.

    python contrib/benchmarks/training.py [--steps 6] [--batch 32] [--microbatch 4] [--hidden 512] [--layers 8]

GPT-2-like, sequence 128, bytes of the standard library. Every node is a process of its own with one thread, on loopback, with
its own p2pd. Medians over all steps but the first, which allocates; the baseline runs before and after, in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

from swarmnode.localswarm import LocalSwarm, NodeProcess

SEQUENCE = 128
TIMEOUT_S = 3600.0
Meanwhile = Callable[[list[NodeProcess], NodeProcess], None]
"""(nodes, trainer): what happens to a swarm while it trains"""


def make_checkpoint(folder: Path, layers: int, hidden: int) -> None:
    """Save a random GPT-2 on bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = GPT2Config(
        n_embd=hidden, n_layer=layers, n_head=8, n_positions=SEQUENCE, vocab_size=256, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)


def tokens_per_s(log: Path) -> float:
    """Return the median tokens/s of the steps after the first."""
    return statistics.median(json.loads(line)["tokens_per_s"] for line in log.read_text().splitlines()[1:])


class Bench:
    """Training runs of one model with one set of settings, alone and in several swarms."""

    def __init__(self, folder: Path, model: Path, settings: list[str]) -> None:
        self._folder = folder
        self._model = model
        self._settings = settings
        self._runs = 0

    def _new(self) -> Path:
        self._runs += 1
        folder = self._folder / str(self._runs)
        folder.mkdir()
        return folder

    def alone(self) -> Path:
        """Train in one process with one thread, and return its log of steps."""
        folder = self._new()
        local = LocalSwarm(folder)
        local.create(self._model, "--mode", "train")
        extra = ["--local", "--threads", "1", "--log", str(folder / "log")]
        local.command("train", str(local.file), *extra, *self._settings, timeout_s=TIMEOUT_S)
        return folder / "log"

    def swarm(self, spans: list[str], *, meanwhile: Meanwhile = lambda _nodes, _trainer: None) -> Path:
        """Train with a node for each span, and return the trainer's log. `meanwhile` is called once the trainer has started.
        Raises SystemExit if the trainer fails."""
        folder = self._new()
        with contextlib.ExitStack() as stack:
            local = stack.enter_context(LocalSwarm(folder))
            local.create(self._model, "--mode", "train")
            local.bootstrap()
            nodes = [local.node(f"node-{number}", "--span", span) for number, span in enumerate(spans)]
            for node in nodes:
                node.wait_for("ready")
            trainer = local.trainer("trainer", "--log", str(folder / "log"), *self._settings)
            meanwhile(nodes, trainer)
            if trainer.finish(TIMEOUT_S):
                raise SystemExit(f"the trainer failed: {trainer.tail()}")
        return folder / "log"


def parse_options(description: str | None) -> argparse.Namespace:
    """Parse the sizes of the model and of the run, for this and similar benchmarks."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in (("steps", 6), ("batch", 32), ("microbatch", 4), ("hidden", 512), ("layers", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def shapes_of(units: int) -> dict[str, list[str]]:
    """Return the spans of the nodes, by name of the swarm."""
    half = units // 2
    return {"2 stages": [f"0:{half}", f"{half}:{units}"], "2 replicas": [f"0:{units}"] * 2}


def settings_of(options: argparse.Namespace) -> list[str]:
    """Return the arguments of `swarmnode train`."""
    return [
        "--data", typing.__file__, "--steps", str(options.steps), "--batch", str(options.batch),
        "--microbatch", str(options.microbatch), "--sequence", str(SEQUENCE), "--checkpoint-steps", "1000",
    ]  # fmt: skip


@contextlib.contextmanager
def bench_of(options: argparse.Namespace) -> Iterator[Bench]:
    """Yield a bench with a random model. Its files are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        folder = Path(name)
        make_checkpoint(folder / "model", options.layers, options.hidden)
        yield Bench(folder, folder / "model", settings_of(options))


def main() -> None:
    options = parse_options(__doc__)
    with bench_of(options) as bench:
        before = tokens_per_s(bench.alone())
        measured = {shape: tokens_per_s(bench.swarm(spans)) for shape, spans in shapes_of(options.layers + 2).items()}
        alone = statistics.mean([before, tokens_per_s(bench.alone())])
    report = {
        shape: {"tokens_per_s": round(speed, 1), "ratio": round(speed / alone, 3)} for shape, speed in measured.items()
    }
    print(json.dumps({"settings": vars(options), "one_process_tokens_per_s": round(alone, 1), **report}, indent=2))


if __name__ == "__main__":
    main()
