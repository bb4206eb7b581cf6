"""Peak resident memory of a node, beside the peak of its ledger: `contrib/benchmarks/memory.py [PART …] [--small]`.

    serving         GPT-2 of 184 M parameters in float32, one node, 32 sessions at once.
    serving_large   Llama of 1.1 B in bf16 (`--layers` of it), one node, 32 sessions at once.
    training        GPT-2 of 184 M parameters, one node, AdamW.
    training_large  Llama of 1.1 B (`--layers` of it), one node, SGD.

Prints JSON. `base_mb` is what the process takes for itself: the highest resident memory (VmHWM) of a node that does the same with
a model of some hundred kB, less what its ledger had promised at most. `ratio` is (VmHWM - base) / (the most that the ledger
had promised), which shall be at most 1.15. Weights that are mapped from files count as resident.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from plain_decoding import joined
from real_sizes import (
    READY_TIMEOUT_S,
    REAL,
    SMALL,
    Sizes,
    make_gpt2,
    make_llama,
    prompt_of,
    settings,
    together,
)
from training import TIMEOUT_S

from swarmnode.localswarm import LocalSwarm, NodeProcess

SESSIONS = 32
PROMPT, NEW = 96, 24
LENT = "20GB"  # a node that trains asks for 16 bytes a parameter, as AdamW takes
MICROBATCHES = 4  # of one sample each: as many as are in flight at once in a short pipeline


@dataclass(frozen=True)
class Use:
    """Peak of a node's resident memory, peak of its ledger's promises, and the promises by account at the time of the
    reading."""

    resident_mb: float
    promised_mb: float
    accounts_mb: dict[str, float]

    @classmethod
    def of(cls, node: NodeProcess, url: str) -> Use:
        """Return the use of a node that serves metrics at `url`."""
        status = Path(f"/proc/{node.pid}/status").read_text()
        with urllib.request.urlopen(url) as answer:
            text = answer.read().decode()
        peak = re.search(r'^swarmnode_memory_peak_bytes\{.*place="host".*\} (\S+)$', text, re.MULTILINE)
        accounts = re.findall(r'^swarmnode_memory_reserved_bytes\{account="(\w+)".*\} (\S+)$', text, re.MULTILINE)
        assert peak is not None, "the node has no ledger"
        resident_kib = float(status.split("VmHWM:")[1].split()[0])
        held = {name: round(float(size) / 1e6, 1) for name, size in accounts if float(size)}
        return cls(resident_kib * 1024 / 1e6, float(peak[1]) / 1e6, held)


def beside(small: Use, real: Use) -> dict[str, Any]:
    """Return the figures of a node with a real model. Its base is measured on a node with a tiny one."""
    base_mb = small.resident_mb - small.promised_mb
    return {
        "base_mb": round(base_mb, 1),
        "resident_mb": round(real.resident_mb, 1),
        "promised_mb": round(real.promised_mb, 1),
        "ratio": round((real.resident_mb - base_mb) / real.promised_mb, 3),
        "accounts_mb": real.accounts_mb,
    }


def serve(folder: Path, shape: Sizes, *extra: str) -> Use:
    """Serve the checkpoint in `folder / "model"` from one node to SESSIONS sessions at once."""
    import uvloop

    with LocalSwarm(folder) as swarm:
        swarm.create(folder / "model")
        swarm.bootstrap()
        node = swarm.node("node", "--metrics-port", "0", *extra)
        url = node.wait_for("metrics", READY_TIMEOUT_S)["url"]
        node.wait_for("ready", READY_TIMEOUT_S)

        async def ask() -> None:
            client = await joined(swarm, 1)
            try:
                prompts = [prompt_of(shape, PROMPT - number, number) for number in range(SESSIONS)]
                await together(client, prompts, NEW)
            finally:
                await client.close()

        uvloop.run(ask())
        return Use.of(node, url)


def whole(model: Path) -> str:
    """Return the span of all units of a model."""
    config = json.loads((model / "config.json").read_text())
    return f"0:{config.get('num_hidden_layers', config.get('n_layer')) + 2}"


def train(folder: Path, shape: Sizes, *extra: str) -> Use:
    """Train the checkpoint in `folder / "model"` for two steps on one node. Raises SystemExit if the trainer fails."""
    with LocalSwarm(folder) as swarm:
        swarm.create(folder / "model", "--mode", "train")
        swarm.bootstrap()
        node = swarm.node("node", "--metrics-port", "0", "--span", whole(folder / "model"), "--memory", LENT)
        url = node.wait_for("metrics", READY_TIMEOUT_S)["url"]
        node.wait_for("ready", READY_TIMEOUT_S)
        trainer = swarm.trainer("trainer", *settings(shape, MICROBATCHES, 1, 2, *extra))
        if trainer.finish(TIMEOUT_S):
            raise SystemExit(f"the trainer failed: {trainer.tail()}")
        return Use.of(node, url)


def compare(
    make: Callable[[Path, Sizes], None], use: Callable[[Path, Sizes], Use], sizes: Sizes, folder: Path
) -> dict[str, Any]:
    """Use a model of `SMALL` sizes and one of `sizes`, and return the figures of the latter."""
    uses = []
    for name, shape in (("small", SMALL), ("real", sizes)):
        (folder / name).mkdir()
        make(folder / name / "model", shape)
        uses.append(use(folder / name, shape))
    return beside(*uses)


def of_layers(sizes: Sizes, layers: int | None) -> Sizes:
    """Return `sizes` with `layers` layers of the large model; unchanged if `layers` is None."""
    if layers is None:
        return sizes
    return Sizes(**{**vars(sizes), "llama": {**sizes.llama, "num_hidden_layers": layers}})


def gpt2(folder: Path, shape: Sizes) -> None:
    """Save a random GPT-2 (184 M parameters at full size) with room for 256 positions at least."""
    make_gpt2(folder, {**shape.gpt2, "n_positions": max(shape.gpt2["n_positions"], 256)})


def llama(dtype: str) -> Callable[[Path, Sizes], None]:
    """Return a function that saves a random Llama (1.1 B parameters at full size) in `dtype`."""
    return lambda folder, shape: make_llama(folder, shape.llama, dtype=dtype)


def serving(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Measure the memory of serving GPT-2 in float32."""
    return compare(gpt2, lambda at, _shape: serve(at, BYTES), sizes, folder)


def serving_large(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Measure the memory of serving a Llama in bf16."""
    return compare(llama("bfloat16"), lambda at, shape: serve(at, shape, "--dtype", "bfloat16"), sizes, folder)


def training(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Measure the memory of training GPT-2 with AdamW."""
    return compare(gpt2, train, sizes, folder)


def training_large(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Measure the memory of training a Llama with SGD."""
    return compare(llama("float32"), lambda at, shape: train(at, shape, "--optimizer", "sgd"), sizes, folder)


BYTES = Sizes(
    **{**vars(SMALL), "llama": {**SMALL.llama, "vocab_size": SMALL.gpt2["vocab_size"]}}
)  # ids that all models have
PARTS: dict[str, Callable[[Sizes, Path], dict[str, Any]]] = {
    part.__name__: part for part in (serving, serving_large, training, training_large)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*PARTS, []], help=", ".join(PARTS))
    parser.add_argument("--layers", type=int, help="number of layers of the large model")
    parser.add_argument("--small", action="store_true", help="models of some hundred kB: that it runs")
    options = parser.parse_args()
    from transformers.utils import logging

    logging.disable_progress_bar()
    for part in options.parts or PARTS:
        sizes = of_layers(SMALL if options.small else REAL, options.layers)
        with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
            print(json.dumps({part: PARTS[part](sizes, Path(name))}), flush=True)


if __name__ == "__main__":
    main()
