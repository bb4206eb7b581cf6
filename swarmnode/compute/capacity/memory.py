"""Number of layers of a model that fit into memory: exact from the checkpoint's headers, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnode.config import PLAIN
from swarmnode.counting import format_bytes

if TYPE_CHECKING:
    import torch

    from swarmnode.compute.model.checkpoint import Checkpoint
    from swarmnode.swarm.records.run import Run

# Bytes per weight of a quantised matrix, block scales included (int8 by rows; NF4 by blocks of 64 with double quantisation,
# arXiv 2305.14314 section 3). Other tensors keep their dtype.
QUANTIZED_BYTES = {"int8": 1.0, "nf4": 0.5 + 0.127 / 8}
TRAINING_BYTES = 16  # per parameter
STATE_BYTES = 12  # of these, needed by another holder: all but gradients
BUFFER_BYTES = 64 << 20  # for activations, the allocator, journals and messages
BUFFER_SHARE = 0.05


@dataclass(frozen=True)
class UnitSizes:
    """Bytes of each layer of a model: of its weights, and of the KV cache of one token of one row."""

    weight_bytes: tuple[int, ...]
    cache_bytes_per_token: tuple[int, ...]

    def need_bytes(self, start: int, end: int, cache_tokens: int) -> int:
        """Return the memory for layers [start, end) with a cache of `cache_tokens` (rows x positions)."""
        return sum(self.weight_bytes[start:end]) + cache_tokens * sum(self.cache_bytes_per_token[start:end])


def unit_sizes(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    quantize: str = "none",
    keeps_packed: bool = False,
    kv: str = PLAIN,
) -> UnitSizes:
    """Return the sizes as loaded: tensors in `dtype`, the layers' matrices quantised if asked (but fused experts are not), packed
    tensors as they are if `keeps_packed`, and the KV cache in the form `kv`.

    A tied matrix counts in both ends.
    """
    family = checkpoint.family
    weights = [0.0] * family.units
    for name, entry in checkpoint.entries.items():
        for unit in family.units_of_tensor(name):
            is_matrix = 1 <= unit <= family.layer_count and len(entry.shape) == 2 and ".experts." not in name
            width = QUANTIZED_BYTES[quantize] if is_matrix and quantize in QUANTIZED_BYTES else dtype.itemsize
            weights[unit] += entry.packed_bytes if keeps_packed and entry.is_packed else entry.elements * width
    cache = (family.cache_bytes_per_token(unit, dtype.itemsize, kv) for unit in range(family.units))
    return UnitSizes(tuple(int(size) for size in weights), tuple(cache))


def graph_sizes(checkpoint: Checkpoint) -> UnitSizes:
    """Return the sizes of a served graph's layers, which cache nothing between passes. A shared tensor counts in each layer."""
    weights = tuple(
        sum(checkpoint.entries[name].nbytes for name in checkpoint.tensors_of(unit, unit + 1))
        for unit in range(checkpoint.units)
    )
    return UnitSizes(weights, (0,) * len(weights))


def training_sizes(checkpoint: Checkpoint) -> UnitSizes:
    """Return the sizes for training: parameters, gradients and AdamW's two moments, all in float32.

    A tied matrix counts in both ends.
    """
    weights = tuple(
        TRAINING_BYTES * sum(checkpoint.entries[name].elements for name in checkpoint.tensors_of(unit, unit + 1))
        for unit in range(checkpoint.units)
    )
    return UnitSizes(weights, (0,) * len(weights))


def run_sizes(checkpoint: Checkpoint, run: Run) -> UnitSizes:
    """Return the sizes for a training run: parameters, gradients and the memory of its optimiser, without activations.

    A tied matrix counts in both ends.
    """
    import torch

    from swarmnode.compute.training.optimizer import FLOAT_BYTES, memory_bytes

    weights = []
    for unit in range(checkpoint.units):
        shapes = {name: checkpoint.entries[name].shape for name in checkpoint.tensors_of(unit, unit + 1)}
        tensors = {name: torch.empty(shape, device="meta", requires_grad=True) for name, shape in shapes.items()}
        elements = sum(tensor.numel() for tensor in tensors.values())
        weights.append(2 * FLOAT_BYTES * elements + int(memory_bytes(run, tensors)))
    return UnitSizes(tuple(weights), (0,) * len(weights))


def units_that_fit(sizes: UnitSizes, limit_bytes: int, cache_tokens: int, *, start: int = 1) -> int:
    """Return the most layers from `start` on that fit into `limit_bytes`, with `reserve_bytes` left free for passes."""
    room_bytes = usable_bytes(limit_bytes)
    count = 0
    while start + count < len(sizes.weight_bytes) and (
        sizes.need_bytes(start, start + count + 1, cache_tokens) <= room_bytes
    ):
        count += 1
    return count


def most_anywhere(sizes: UnitSizes, limit_bytes: int, cache_tokens: int) -> int:
    """Return the most layers that fit wherever in the model their span lies; 0 if not even one layer fits everywhere."""
    units = len(sizes.weight_bytes)
    fits = [units_that_fit(sizes, limit_bytes, cache_tokens, start=start) for start in range(units)]
    return next(
        (count for count in range(units, 0, -1) if all(fits[start] >= count for start in range(units - count + 1))), 0
    )


def reserve_bytes(limit_bytes: int) -> int:
    """Return the part of a memory limit that is kept for running passes, journals and messages."""
    return min(limit_bytes, max(BUFFER_BYTES, int(limit_bytes * BUFFER_SHARE)))


def usable_bytes(limit_bytes: int) -> int:
    """Return the part of a memory limit that weights and caches may take."""
    return limit_bytes - reserve_bytes(limit_bytes)


def limit_bytes_for(need_bytes: int) -> int:
    """Return the memory limit whose `usable_bytes` are about `need_bytes`, and no less."""
    return max(need_bytes + BUFFER_BYTES, int(need_bytes / (1 - BUFFER_SHARE)) + 1)


def cache_tokens_that_fit(sizes: UnitSizes, limit_bytes: int, start: int, end: int) -> int:
    """Return the cache positions (rows x positions) that fit beside layers [start, end).

    0 if there is no room, or these layers cache nothing.
    """
    per_token = sum(sizes.cache_bytes_per_token[start:end])
    left_bytes = usable_bytes(limit_bytes) - sum(sizes.weight_bytes[start:end])
    return max(0, left_bytes) // per_token if per_token else 0


def describe_fit(sizes: UnitSizes, start: int, end: int, cache_tokens: int) -> str:
    """Describe the fit, as in "12 of 34 layers: 5.1 GB of weights, and 1.2 GB for texts of 8,192 tokens in all"."""
    weights = sum(sizes.weight_bytes[start:end])
    cache = cache_tokens * sum(sizes.cache_bytes_per_token[start:end])
    text = f"{end - start} of {len(sizes.weight_bytes)} layers: {format_bytes(weights)} of weights"
    return f"{text}, and {format_bytes(cache)} for texts of {cache_tokens:,} tokens in all" if cache else text
