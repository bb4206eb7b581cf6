"""Tiers of a mixture's weights: how many experts of a layer lie in memory if the others stay on the disk, and how fast that is."""

from __future__ import annotations

import math
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
class HostMemory:
    """Memory of the host beside a card: bytes for experts, and the speed of reading them."""

    size_bytes: int
    bytes_per_s: float = math.inf


@dataclass(frozen=True)
class ExpertTier:
    """Memory for `slots` experts in each of a model's `layers` with experts, whose others stay on the disk.

    `layer_bytes` are of a whole layer, `expert_bytes` of one expert, means over layers. `buffer_bytes` are of the readers. Beside a
    card `host_slots` experts of each layer are in the host's memory, and the CPU computes those that are not on it; 0: no card.
    If the tier `is_fixed`, the experts in its slots stay the same. `host_limit_bytes` of the host's memory were given for it.
    A token also reads `other_bytes`, of layers without experts and of the head.
    """

    layers: int
    layer_bytes: float
    expert_bytes: float
    experts: int
    active: int
    slots: int
    buffer_bytes: int = 0
    host_slots: int = 0
    is_fixed: bool = False
    host_limit_bytes: int = 0
    other_bytes: int = 0

    @property
    def numbers_to_load(self) -> tuple[int, int]:
        """Numbers of a layer's experts in the memory that the CPU computes from (0: all), and on a card (0: no card)."""
        return (self.host_slots % self.experts, self.slots) if self.host_slots else (self.slots, 0)

    @property
    def eighths(self) -> str:
        """Shares of the experts in the device's memory and in the host's, in eighths: tiers with equal ones are about as fast."""
        return f"{8 * self.slots // self.experts} {8 * self.host_slots // self.experts}"

    @property
    def hits(self) -> float:
        """Share of a token's experts that are expected to be in the slots."""
        return self.slots / self.experts if self.is_fixed else expected_hits(self.slots, self.experts)

    def host_bytes(self, layers: int) -> int:
        """Return the memory of the host that the experts of so many layers take beside a card, with the readers."""
        return int(min(layers, self.layers) * self.host_slots * self.expert_bytes) + 2 * self.buffer_bytes

    @property
    def missed_bytes(self) -> float:
        """Bytes that one token is expected to read from the disk."""
        if not self.host_slots:
            return self.layers * self.active * (1 - self.hits) * self.expert_bytes
        others = max(1, self.experts - self.slots)  # that the host is asked for
        missed = (1 - self.hits) * (1 - expected_hits(min(others, self.host_slots), others))
        return self.layers * self.active * missed * self.expert_bytes

    def token_s(
        self, memory_bytes_per_s: float, disk_bytes_per_s: float = DISK_BYTES_PER_S, host_bytes_per_s: float = math.inf
    ) -> float:
        """Return the seconds that one token is expected to take in the whole model, at the speeds of memory, disk, and the host's
        memory beside a card, which computes at the same time."""
        used = self.active * (self.hits if self.host_slots else 1.0)  # experts that the device multiplies
        here_bytes = self.layers * (self.layer_bytes - (self.experts - used) * self.expert_bytes) + self.other_bytes
        here_s = here_bytes / memory_bytes_per_s
        host_s = self.layers * (self.active - used) * self.expert_bytes / host_bytes_per_s
        return max(here_s, host_s) + self.missed_bytes / disk_bytes_per_s

    def facts(self) -> dict[str, int | float]:
        """Return the figures of the tier, for scripts."""
        return {
            "layers": self.layers,
            "layer_bytes": round(self.layer_bytes),
            "expert_bytes": round(self.expert_bytes),
            "experts": self.experts,
            "slots": self.slots,
            "hits": round(self.hits, 3),
            **({"host_slots": self.host_slots} if self.host_slots else {}),
        }

    def __str__(self) -> str:
        place = "room on the card" if self.host_slots else "memory"
        text = (
            f"{self.layers} layers of {format_bytes(self.layer_bytes)}: {place} for {self.slots} of {self.experts} experts "
            f"a layer, about {round(10 * self.hits)} of 10 found there"
        )
        if not self.host_slots:
            return text
        held = "all" if self.host_slots == self.experts else f"{self.host_slots} of {self.experts}"
        return f"{text}, and the CPU computes the others, with {held} in the host's memory"

    @property
    def others(self) -> str:
        """Sentence on the experts that are not in memory; empty if there are none."""
        if self.host_slots == self.experts:
            return ""
        return (
            "Those in neither memory are read from the disk" if self.host_slots else "The others are read from the disk"
        )


def expert_tier(
    checkpoint: Checkpoint,
    sizes: UnitSizes,
    limit_bytes: int,
    cache_tokens: int,
    needed_units: int,
    *,
    host_bytes: int | None = None,
    is_fixed: bool = False,
) -> tuple[ExpertTier, UnitSizes] | None:
    """Return the tier with the most experts in memory that lets `needed_units` layers fit into `limit_bytes`, wherever they lie,
    and the sizes of the units with it. If not even the smallest tier lets them, it is the one for as many layers as that tier lets.

    The smallest tier has room for the experts of one token. On a card, `host_bytes` of the host's memory are for its experts, and
    for readers. Returns None if the layers fit whole, if no tier lets more layers fit than that, if the host lacks room for the
    experts of one token, or if the model has no experts that are stacked in a GGUF file.
    """
    stacks: dict[int, list[TensorEntry]] = {}
    for name, entry in checkpoint.entries.items():
        units = checkpoint.family.units_of_tensor(name) if entry.is_gguf and entry.is_stack else ()
        if len(units) == 1:
            stacks.setdefault(units[0], []).append(entry)
    active = active_experts(checkpoint.config)
    whole = most_anywhere(sizes, limit_bytes, cache_tokens)
    if not stacks or not active or whole >= needed_units:
        return None
    matrices = [part.nbytes // part.shape[0] for parts in stacks.values() for part in parts]
    readers_bytes = buffer_bytes()
    room_bytes = limit_bytes - (readers_bytes if host_bytes is None else 0)
    most = max(parts[0].shape[0] for parts in stacks.values())

    def with_slots(slots: int) -> UnitSizes:
        left = list(sizes.weight_bytes)
        for unit, parts in stacks.items():
            left[unit] -= sum(max(0, part.shape[0] - slots) * (part.nbytes // part.shape[0]) for part in parts)
        return replace(sizes, weight_bytes=tuple(left))

    smallest = min(active, most)
    held = min(needed_units, most_anywhere(with_slots(smallest), room_bytes, cache_tokens))
    if 0 < held <= whole:  # the tier would hold no more layers
        return None
    fitting = (
        slots
        for slots in range(most - 1, smallest, -1)
        if most_anywhere(with_slots(slots), room_bytes, cache_tokens) >= held
    )
    slots = next(fitting, smallest) if held else smallest
    host_slots = 0
    if host_bytes is not None:  # beside as many layers as the card can hold
        held = most_anywhere(with_slots(slots), room_bytes, cache_tokens)
        each_bytes = sorted(sum(part.nbytes // part.shape[0] for part in parts) for parts in stacks.values())[-held:]
        host_slots = min(most, max(0, host_bytes - 2 * readers_bytes) // max(1, sum(each_bytes)))
        if host_slots < active or not held:
            return None
        is_fixed = is_fixed or host_slots < most  # see `read_split`
    layer_bytes = sum(sizes.weight_bytes[unit] for unit in stacks) / len(stacks)
    tier = ExpertTier(
        layers=len(stacks),
        layer_bytes=layer_bytes,
        expert_bytes=sum(matrices) / len(stacks),
        experts=most,
        active=active,
        slots=slots,
        buffer_bytes=readers_bytes,
        host_slots=host_slots,
        is_fixed=is_fixed,
        host_limit_bytes=host_bytes or 0,
        # of the embedding one row is read
        other_bytes=sum(size for unit, size in enumerate(sizes.weight_bytes) if unit and unit not in stacks),
    )
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
    checkpoint: Checkpoint,
    sizes: UnitSizes,
    limit_bytes: int,
    cache_tokens: int,
    read_bytes_per_s: float,
    host: HostMemory | None = None,
) -> dict[str, object] | None:
    """Return the figures and the sentence on one machine that holds all layers with experts on its disk, or beside its card in the
    memory of the `host`, and reads its memory at `read_bytes_per_s`; None if there is no such tier, see `whole_model_tier`."""
    tier = whole_model_tier(checkpoint, sizes, limit_bytes, cache_tokens, host)
    if tier is None:
        return None
    speed = 1 / tier.token_s(read_bytes_per_s, host_bytes_per_s=math.inf if host is None else host.bytes_per_s)
    disk = f" with a disk of {DISK_BYTES_PER_S / 1e9:.0f} GB/s" if tier.missed_bytes else ""
    about = f"about {float(format(speed, '.2g')):,g} tokens/s{disk}"
    return {**tier.facts(), "tokens_per_s": round(speed, 3), "says": f"{tier}, {about}"}


def whole_model_tier(
    checkpoint: Checkpoint, sizes: UnitSizes, limit_bytes: int, cache_tokens: int, host: HostMemory | None = None
) -> ExpertTier | None:
    """Return the tier with which `limit_bytes`, of a card if there is a `host`, hold all layers of a mixture whose experts do not
    all fit.

    Returns None if the model fits whole, is no mixture in a GGUF file, or is too large with the smallest tier, too.
    """
    units, host_bytes = len(sizes.weight_bytes), None if host is None else host.size_bytes
    found = expert_tier(checkpoint, sizes, limit_bytes, cache_tokens, units, host_bytes=host_bytes)
    if found is None:
        return None
    tier, left = found
    readers_bytes = tier.buffer_bytes if host is None else 0
    return tier if most_anywhere(left, limit_bytes - readers_bytes, cache_tokens) >= units else None
