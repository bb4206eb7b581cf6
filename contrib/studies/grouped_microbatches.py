"""Largest gain of passes that hold the microbatches of several adapters: `python contrib/studies/grouped_microbatches.py MODEL…`.

MODEL is a folder or a GGUF file. Four of its layers are loaded. Microbatches of one, two, four and eight rows go forward and back
through them with LoRA of rank 16. A pass of rows with different adapters cannot cost less than one of as many rows with the same
adapter. So the seconds of a lone row, divided by those per row of a pass of eight, bound the gain of a grouped pass. Seconds are
those of the thread, medians of interleaved rounds. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from swarmnode.compute.executor import drain
from swarmnode.compute.gguf.gguf import GgufCheckpoint
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.compute.training.adapters.adapter_trainer import AdapterTrainer
from swarmnode.ledger import MemoryLedger

LAYERS = (1, 5)
ROWS = (1, 2, 4, 8)
LEDGER_BYTES = 1 << 34


def packed(file: Path, folder: Path) -> Path:
    """Write a GGUF file's weights to `folder`, packed as they are, and return it."""
    folder.mkdir()
    GgufCheckpoint(file).pack(folder)
    return folder


def seconds(trainer: AdapterTrainer, rows: int, length: int, hidden: int) -> float:
    """Return the seconds of the thread for a microbatch forward and back."""
    x_BSH = torch.randn(rows, length, hidden)
    began_s = time.thread_time()
    leaving_BSH = drain(trainer.forward_by_piece(0, x_BSH))
    drain(trainer.backward_by_piece(0, torch.randn_like(leaving_BSH)))
    return time.thread_time() - began_s


def measure(path: Path, products: str, length: int, rounds: int) -> dict[str, float]:
    """Return the seconds per row of passes of each number of rows."""
    span = load_span(Checkpoint(path), *LAYERS, dtype=torch.float32, products=products)
    span.adapters.ledger = MemoryLedger(LEDGER_BYTES)
    trainer = AdapterTrainer(span, AdapterRecipe(rank=16, alpha=32.0), name="one")
    drain(trainer.start_by_piece())
    hidden = span.config.hidden_size
    found: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(rounds):
        for rows in ROWS:
            found[rows].append(seconds(trainer, rows, length, hidden) / rows)
    trainer.close()
    per_row = {rows: statistics.median(some) for rows, some in found.items()}
    named = {f"{rows}_rows_s": round(value, 5) for rows, value in per_row.items()}
    return {**named, "largest_gain": round(per_row[1] / per_row[ROWS[-1]], 3)}


def main() -> None:
    """Measure all models, kinds of products and lengths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--products", nargs="+", default=["plain", "exact", "fast"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[32, 128, 512])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {
            f"{model.name} {products} {length}": measure(path, products, length, options.rounds)
            for number, model in enumerate(options.models)
            for path in [model if model.is_dir() else packed(model, Path(folder) / str(number))]
            for products in options.products
            for length in options.lengths
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
