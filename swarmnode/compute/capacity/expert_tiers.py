"""Tiers of a mixture's weights: how many experts of a layer lie in memory if the others stay on the disk, and how fast that is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from swarmnode.compute.capacity.capacity import UnitSizes, most_anywhere
from swarmnode.compute.expert_slots import buffer_bytes, expected_hits
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.packing.tensor_entry import TensorEntry
from swarmnode.counting import format_bytes

DISK_BYTES_PER_S = 1e9  # assumed unless reads were measured
_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def active_experts(config: Any) -> int:
    """Return the number of a layer's experts that a token uses; 0 for a model without experts."""
    numbers = (getattr(config, name, None) for name in _NAMES)
    return next((number for number in numbers if isinstance(number, int) and number > 0), 0)


@dataclass(frozen=True)
class ExpertTier:
    """Memory for `slots` experts in each of a model's `layers` with experts, whose others stay on the disk.

    `layer_bytes` are of a whole layer, `expert_bytes` of one expert, means over layers. `buffer_bytes` are of the readers.
    """

    layers: int
    layer_bytes: float
    expert_bytes: float
    experts: int
    active: int
    slots: int
    buffer_bytes: int = 0

    @property
    def missed_bytes(self) -> float:
        """Bytes that one token is expected to read from the disk."""
        return self.layers * self.active * (1 - expected_hits(self.slots, self.experts)) * self.expert_bytes

    def token_s(self, memory_bytes_per_s: float, disk_bytes_per_s: float = DISK_BYTES_PER_S) -> float:
        """Return the seconds that one token is expected to take in all these layers, at the speeds of memory and disk."""
        used_bytes = self.layers * (self.layer_bytes - (self.experts - self.active) * self.expert_bytes)
        return used_bytes / memory_bytes_per_s + self.missed_bytes / disk_bytes_per_s

    def facts(self) -> dict[str, int | float]:
        """Return the figures of the tier, for scripts."""
        return {
            "layers": self.layers,
            "layer_bytes": round(self.layer_bytes),
            "expert_bytes": round(self.expert_bytes),
            "experts": self.experts,
            "slots": self.slots,
            "hits": round(expected_hits(self.slots, self.experts), 3),
        }

    def __str__(self) -> str:
        found = round(10 * expected_hits(self.slots, self.experts))
        return (
            f"{self.layers} layers of {format_bytes(self.layer_bytes)}: memory for {self.slots} of {self.experts} experts a layer, "
            f"about {found} of 10 found there"
        )


def expert_tier(
    checkpoint: Checkpoint, sizes: UnitSizes, limit_bytes: int, cache_tokens: int, needed_units: int
) -> tuple[ExpertTier, UnitSizes] | None:
    """Return the tier with the most experts in memory that lets `needed_units` layers fit into `limit_bytes`, wherever they lie,
    and the sizes of the units with it; the smallest tier if not even that one does.

    The smallest tier has room for the experts of one token. Returns None if the layers fit whole, or the model has no experts that
    are stacked in a GGUF file.
    """
    stacks: dict[int, list[TensorEntry]] = {}
    for name, entry in checkpoint.entries.items():
        units = checkpoint.family.units_of_tensor(name) if entry.is_gguf and entry.is_stack else ()
        if len(units) == 1:
            stacks.setdefault(units[0], []).append(entry)
    active = active_experts(checkpoint.config)
    if not stacks or not active or most_anywhere(sizes, limit_bytes, cache_tokens) >= needed_units:
        return None
    matrices = [part.nbytes // part.shape[0] for parts in stacks.values() for part in parts]
    readers_bytes = buffer_bytes()
    room_bytes = limit_bytes - readers_bytes
    most = max(parts[0].shape[0] for parts in stacks.values())

    def with_slots(slots: int) -> UnitSizes:
        left = list(sizes.weight_bytes)
        for unit, parts in stacks.items():
            left[unit] -= sum(max(0, part.shape[0] - slots) * (part.nbytes // part.shape[0]) for part in parts)
        return replace(sizes, weight_bytes=tuple(left))

    fitting = (
        slots
        for slots in range(most - 1, active, -1)
        if most_anywhere(with_slots(slots), room_bytes, cache_tokens) >= needed_units
    )
    slots = next(fitting, min(active, most))
    layer_bytes = sum(sizes.weight_bytes[unit] for unit in stacks) / len(stacks)
    tier = ExpertTier(len(stacks), layer_bytes, sum(matrices) / len(stacks), most, active, slots, readers_bytes)
    return tier, with_slots(slots)


def disk_advice(
    checkpoint: Checkpoint, sizes: UnitSizes, limit_bytes: int, cache_tokens: int, needed_units: int
) -> str:
    """Return which form of its weights lets a mixture lie on the disk; empty if `needed_units` layers fit into `limit_bytes`, for a
    mixture in a GGUF file, and for a model without experts.

    Matrices of quantised safetensors are rewritten when they are loaded, from several tensors each, so no slot can be filled from
    the bytes of their file.
    """
    is_gguf = any(entry.is_gguf for entry in checkpoint.entries.values())
    fits = most_anywhere(sizes, limit_bytes, cache_tokens) >= needed_units
    if is_gguf or fits or not active_experts(checkpoint.config):
        return ""
    plain = "its plain weights" if checkpoint.quantised is not None else "it"
    return f"Experts of safetensors stay in memory. Those that `swarmnode quantize` writes from {plain} may lie on the disk."


def on_one_machine(
    checkpoint: Checkpoint, sizes: UnitSizes, limit_bytes: int, cache_tokens: int, read_bytes_per_s: float
) -> dict[str, object] | None:
    """Return the figures and the sentence on one machine that holds all layers with experts on its disk, and reads its memory at
    `read_bytes_per_s`; None if there is no such tier, see `whole_model_tier`."""
    tier = whole_model_tier(checkpoint, sizes, limit_bytes, cache_tokens)
    if tier is None:
        return None
    speed = 1 / tier.token_s(read_bytes_per_s)
    says = f"{tier}, about {speed:.2g} tokens/s with a disk of {DISK_BYTES_PER_S / 1e9:.0f} GB/s"
    return {**tier.facts(), "tokens_per_s": round(speed, 3), "says": says}


def whole_model_tier(
    checkpoint: Checkpoint, sizes: UnitSizes, limit_bytes: int, cache_tokens: int
) -> ExpertTier | None:
    """Return the tier with which `limit_bytes` hold all layers of a mixture whose experts do not all fit.

    Returns None if the model fits whole, is no mixture in a GGUF file, or is too large with the smallest tier, too.
    """
    found = expert_tier(checkpoint, sizes, limit_bytes, cache_tokens, len(sizes.weight_bytes))
    if found is None or most_anywhere(found[1], limit_bytes - found[0].buffer_bytes, cache_tokens) < len(
        sizes.weight_bytes
    ):
        return None
    return found[0]
