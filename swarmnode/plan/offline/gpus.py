"""Graphics cards: datasheet figures, and measured times of a transformer layer.

`data/gpu_speeds.csv`: peak speeds, memory and memory bandwidth from the vendors' datasheets. `data/helix_layer_times.json`:
milliseconds of one layer of LLaMA-30B and LLaMA-2-70B against the tokens in the batch, as profiled by Helix (arXiv 2406.01566).
"""

from __future__ import annotations

import csv
import io
import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

SPEEDS_FILE, LAYER_TIMES_FILE = "gpu_speeds.csv", "helix_layer_times.json"
LAYER_PARAMETERS = {  # of one layer: attention and gated feed-forward matrices, from the models' published shapes
    "llama1_30b": 4 * 6656**2 + 3 * 6656 * 17920,
    "llama2_70b": 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672,
}


@dataclass(frozen=True)
class Gpu:
    """Datasheet figures of a card. `flops`: fp16 or bf16 tensor operations per second, dense, summed in fp32."""

    name: str
    flops: float
    memory_bytes: int
    memory_bytes_per_s: float


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer of `parameters` parameters on a card, against tokens in the batch; straight lines in between."""

    parameters: int
    prompt: tuple[tuple[float, float], ...]
    decode: tuple[tuple[float, float], ...]

    def prompt_s(self, tokens: float) -> float:
        """Return the seconds of a prompt, or of a training microbatch's forward pass, of `tokens` tokens."""
        return _interpolate(self.prompt, tokens)

    def decode_s(self, batch: float) -> float:
        """Return the seconds of one token each of `batch` sessions."""
        # the first point is (0, 0): no batch is so fast
        return _interpolate(self.decode, max(batch, self.decode[1][0]))


@lru_cache
def gpus_by_name() -> Mapping[str, Gpu]:
    """Return all cards of the datasheet table, by name."""
    rows = csv.DictReader(io.StringIO(_read(SPEEDS_FILE)))
    return {
        row["gpu"]: Gpu(
            name=row["gpu"],
            flops=float(row["fp16_tensor_tflops_dense_fp32acc"]) * 1e12,
            memory_bytes=int(float(row["vram_gb"]) * 1e9),
            memory_bytes_per_s=float(row["mem_bw_gb_s"]) * 1e9,
        )
        for row in rows
    }


def find_gpu(name: str | None) -> Gpu | None:
    """Return the card of this name, in any case and with any maker; None if unknown. "NVIDIA GeForce RTX 3080" is "RTX 3080"."""
    if name is None:
        return None
    words = _words(name)
    fitting = [gpu for gpu in gpus_by_name().values() if words >= _words(gpu.name)]
    if not fitting:  # "H100" may be either: the slower one, which comes first
        fitting = [gpu for gpu in gpus_by_name().values() if words and words <= _words(gpu.name)]
    return max(fitting, key=lambda gpu: len(_words(gpu.name)), default=None)


def layer_times(name: str | None, layer_parameters: int) -> LayerTimes | None:
    """Return measured layer times on the card `name` ("T4x2" means two cards); None if there are none for it.

    They belong to the measured model whose layers are nearest to `layer_parameters` parameters.
    """
    several = re.search(r"x\s?([24])$", name or "")
    gpu = find_gpu(re.sub(r"\s?x\s?[24]$", "", name or ""))
    if gpu is None:
        return None
    measured = _layer_times()
    nearest = min(measured, key=lambda model: abs(LAYER_PARAMETERS[model] - layer_parameters))
    return measured[nearest].get(gpu.name.split()[0].lower() + (several[0].replace(" ", "") if several else ""))


@lru_cache
def _layer_times() -> Mapping[str, Mapping[str, LayerTimes]]:
    models = json.loads(_read(LAYER_TIMES_FILE))["model"]
    return {
        model: {
            gpu: LayerTimes(LAYER_PARAMETERS[model], _seconds(times["prompt"]), _seconds(times["decode"]))
            for gpu, times in gpus.items()
        }
        for model, gpus in models.items()
    }


def _read(name: str) -> str:
    return (resources.files("swarmnode.plan.offline") / "data" / name).read_text()


def _seconds(points: Sequence[Sequence[float]]) -> tuple[tuple[float, float], ...]:
    return tuple((tokens, milliseconds / 1e3) for tokens, milliseconds in points)


def _words(name: str) -> frozenset[str]:
    """Return the words of a card's name, in lower case, without words that many cards share."""
    makers = {"nvidia", "geforce", "tesla", "quadro", "rtx", "graphics", "sxm2"}
    return frozenset(name.lower().replace("-", " ").split()) - makers


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return y at `x` on the straight lines through the points; past the last point, on the line from the origin through it."""
    if x >= points[-1][0]:
        return points[-1][1] * x / points[-1][0]
    right = max(1, bisect_left(points, (x, 0.0)))
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
