"""A span of units of a model on one device: its loading and its forward pass.

`family.py` defines the units, `assemble.py` builds the model of the span, `stack.py` leads hidden states through its layers.
"""

from __future__ import annotations

import contextlib
import inspect
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from swarmnode.compute.expert_slots import ExpertSlots
from swarmnode.compute.model.adapters.span_adapters import SpanAdapters
from swarmnode.compute.model.assemble import Packed, assemble
from swarmnode.compute.model.attention import SameBits, attend_by_position, attends_by_position
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.equal_bits.equal_rows import has_equal_rows, positions_of_rows
from swarmnode.compute.model.family import Family
from swarmnode.compute.model.fresh import position_limit
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.linear import PackedLinear, Packings, packed_bytes
from swarmnode.compute.model.quantised_weights import plain_slices, read_quantised
from swarmnode.compute.model.stack import ANCHOR, BASE, Stack, digits_of, ids_of
from swarmnode.compute.model.traced_model import CACHE_ARGUMENT, suit_cache
from swarmnode.compute.packing.card_matrix import working_bytes
from swarmnode.compute.packing.packed_weight import (
    PackedStack,
    PackedWeight,
    SlotStack,
    held_by,
    read_slots,
    read_weights,
)
from swarmnode.compute.packing.quantize import Quantization
from swarmnode.compute.packing.split_experts import SplitStack, read_split, time_of_expert_s
from swarmnode.compute.stopwatch import Clock
from swarmnode.config import EXACT, FAST, PLAIN
from swarmnode.errors import LocalError, ProtocolError

WIDTHS, WIDEST, LOGITS = 6, 3, 2  # tensors at once in a pass: of the hidden size, of a layer's widest, of logits


class HiddenReader(Protocol):
    """Owner of weights beside a span that reads the states which leave its last layer: a prediction layer (`model/mtp.py`)."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights."""

    def move_to(self, device: torch.device) -> None:
        """Move the weights to another device."""

    def close(self) -> None:
        """Free the memory of the weights."""


class ModelSpan:
    """Units [start, end) of a model, ready to run.

    `model` is the family's causal language model, cut down. Only `packings` may be used from a second thread. If a `reader` is
    set, the hidden states that leave the last layer come with the logits.
    """

    def __init__(
        self,
        family: Family,
        model: Any,
        start: int,
        end: int,
        quantization: Quantization | None = None,
        packings: Packings | None = None,
    ) -> None:
        self.family = family
        self.model = model
        self.start = start
        self.end = end
        self.quantization = quantization
        self.packings = Packings.of(model, {}) if packings is None else packings
        self.adapters = SpanAdapters(model)
        self.reader: HiddenReader | None = None
        self.stack: Stack = model.get_submodule(family.stack_name)
        floats = (p for p in model.parameters() if p.is_floating_point())
        parameter: Any = next(floats, None)
        parameter = next(held_by(model)) if parameter is None else parameter
        self.device: torch.device = parameter.device
        """Device that holds the weights"""
        self.dtype: torch.dtype = parameter.dtype
        """Dtype of hidden states and caches"""
        # Sizes H of the hidden states and V of the vocabulary, kept here as reading them from the config takes 40 us a pass.
        self.hidden_size = int(model.config.hidden_size)
        self.width = family.width
        """Numbers of a position that cross a boundary between units"""
        self.digits = family.digits
        """Digits of the token's id, in base 256 and divided by 256, among them: the last ones"""
        self.vocab_size = int(model.config.vocab_size)
        self.lowered: dict[Any, Any] = {}  # what ranges of units compute as one graph, or why they do not
        self._accepts_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.steps_singly = False
        """Whether the family's code can continue recurrent states only by one position at a time"""
        self.has_equal_rows = has_equal_rows(model)
        """Whether plain products have equal bits (`--equal-bits`)"""
        self.has_same_bits = attends_by_position(model) or self.has_equal_rows
        """Whether a position has the same bits in any company: the products, and all that lies between them."""

    def __repr__(self) -> str:
        return f"Span([{self.start}:{self.end}) of {self.family.units} units, {self.weight_bytes / 1e6:.1f} MB)"

    @property
    def config(self) -> Any:
        """Transformers config of the whole model."""
        return self.model.config

    @cached_property
    def position_limit(self) -> int | None:
        """Most positions that a sequence may have; None if the family has no limit."""
        return position_limit(self.family)

    @property
    def has_embedding(self) -> bool:
        """Whether the span takes token ids: it holds the embedding."""
        return self.start == 0

    @property
    def has_head(self) -> bool:
        """Whether the span has the model's head, and so returns logits."""
        return self.end == self.family.units

    @cached_property
    def has_exact_products(self) -> bool:
        """Whether ggml multiplies packed matrices exactly on this CPU, in a model that computes in float32, all in memory."""
        if self.experts_on_disk is not None:  # a machine with all experts in memory multiplies them in torch's way
            return False
        is_float = self.dtype == torch.float32 and self.device.type == "cpu"
        return is_float and any(isinstance(each, PackedWeight) and each.is_exact for each in held_by(self.model))

    @cached_property
    def split_experts(self) -> list[SplitStack]:
        """Stacks of experts of which some lie on the card, and others are computed by the CPU; empty if there are none."""
        return [weight for weight in held_by(self.model) if isinstance(weight, SplitStack)]

    @cached_property
    def experts_on_disk(self) -> ExpertSlots | None:
        """Slots of experts that are read from the disk when they are needed; None if all weights are in memory."""
        stacks = [stack.host for stack in self.split_experts] or held_by(self.model)
        return next((stack.pool for stack in stacks if isinstance(stack, SlotStack)), None)

    @property
    def expert_pools(self) -> list[ExpertSlots]:
        """Slots of experts on the card, and in memory for those that are read from the disk, if there are such."""
        on_card = [stack.pool for stack in self.split_experts[:1]]
        return on_card if self.experts_on_disk is None else [*on_card, self.experts_on_disk]

    def host_bytes(self, positions: int = 0) -> int:
        """Return the bytes in the host's memory of a span on a card of which the CPU computes some experts, with the values of a
        pass of `positions`; 0 for other spans."""
        if not self.split_experts:
            return 0
        readers_bytes = sum(pool.buffer_bytes for pool in self.expert_pools)
        values_bytes = 4 * positions * WIDTHS * self.hidden_size  # float32
        return sum(stack.host.nbytes for stack in self.split_experts) + readers_bytes + values_bytes

    @property
    def missed_experts(self) -> int:
        """Number of experts so far that passes wanted on the card and did not find there."""
        return self.split_experts[0].pool.misses if self.split_experts else 0

    def expected_wait_s(self, positions: int, seen: float, share: float, clock: Clock) -> float:
        """Return the seconds that a pass of `positions` new positions through a `share` of the layers is expected to take longer
        than a repeated one, which missed `seen` experts on the card and read none from the disk."""
        wait_s = 0.0 if self.experts_on_disk is None else share * self.experts_on_disk.expected_wait_s(positions)
        if self.split_experts:
            pool, expert_s = self.split_experts[0].pool, time_of_expert_s(self.split_experts, positions, clock)
            wait_s += expert_s * max(0.0, share * sum(layer.expected_misses(positions) for layer in pool.layers) - seen)
        return wait_s

    def move_to(self, device: torch.device) -> None:
        """Move the weights to another device. Quantised weights cannot be moved."""
        self.model.to(device)
        for weight in held_by(self.model):
            weight.move_to(device)
        if self.reader is not None:
            self.reader.move_to(device)
        self.device = device

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights and buffers, with the scales of quantised ones and those of the reader; tied ones count once."""
        size = 0 if self.reader is None else self.reader.weight_bytes
        tensors = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}.values()
        if self.quantization is not None:
            return size + self.quantization.bytes_after + sum(int(t.nbytes) for t in tensors if t.is_floating_point())
        held_bytes = sum(weight.nbytes for weight in held_by(self.model))
        if self.experts_on_disk is not None and not self.split_experts:
            held_bytes += self.experts_on_disk.buffer_bytes
        return size + held_bytes + packed_bytes(self.model) + sum(int(tensor.nbytes) for tensor in tensors)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of the plain KV cache of one token of one row, over all layers of the span."""
        return self.kv_bytes_per_token(PLAIN)

    def kv_bytes_per_token(self, kv: str) -> int:
        """Return the bytes of the KV cache of one token of one row in the form `kv`, over all layers of the span."""
        units, size = range(self.start, self.end), self.dtype.itemsize
        received = self.family.received_bytes(self.layers_of(self.start, self.end).start, size, kv)
        return sum(self.family.cache_bytes_per_token(unit, size, kv) for unit in units) + sum(received.values())

    def planned_bytes_per_token(self, kv: str) -> int:
        """Return the bytes to plan for a cached token, over all layers of the span; see `Family.planned_bytes_per_token`."""
        units = range(self.start, self.end)
        return sum(self.family.planned_bytes_per_token(unit, self.dtype.itemsize, kv) for unit in units)

    def pass_bytes(self, positions: int, rows: int) -> int:
        """Return the approximate bytes of one pass besides caches: a layer's values for `positions`, and logits of `rows`.

        `positions` counts the positions of all rows.
        """
        matrices = (p for name, p in self.stack.named_parameters() if p.dim() == 2 and f".{ANCHOR}." not in name)
        shapes = [tuple(p.shape) for p in matrices]
        shapes += [(m.out_features, m.in_features) for m in self.stack.modules() if isinstance(m, PackedLinear)]
        shapes += [tuple(weight.shape[-2:]) for weight in held_by(self.stack)]
        widest = max((max(shape) for shape in shapes), default=self.hidden_size)  # values of one position in a layer
        values = positions * (WIDTHS * self.hidden_size + WIDEST * widest)
        values += LOGITS * rows * self.vocab_size if self.has_head else 0
        # A card dequantises packed weights in tiles.
        tiles = (working_bytes(part) for weight in held_by(self.model) for part in weight.card_parts)
        return 4 * values + max(tiles, default=0)  # float32, or as much

    def close(self) -> None:
        """Free the memory of the weights at once. The span cannot run afterwards."""
        self.adapters.clear()
        for pool in self.expert_pools:
            pool.close()
        self.split_experts.clear()
        if self.reader is not None:
            self.reader.close()
        for module in list(self.model.modules()):
            for held in (module._parameters, module._buffers, module._modules):
                held.clear()
            module.__dict__.pop("_packed", None)
            packed = [name for name, value in vars(module).items() if isinstance(value, PackedWeight | PackedStack)]
            for name in packed:
                delattr(module, name)
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # the card may be lost, with everything on it
                torch.cuda.empty_cache()  # returns the allocator's cached memory to the device

    def layers_of(self, start: int, end: int) -> range:
        """Return the numbers of the layers among units [start, end)."""
        return self.family.layers_of(start, end)

    def forward(
        self,
        x: Tensor,
        *,
        cache: Any,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        keep_last: int = -1,
        start: int | None = None,
        end: int | None = None,
        adapters: tuple[str, ...] = (),
        ids_BT: Tensor | None = None,
    ) -> Tensor:
        """Run units [start, end) of the span on the next positions of a batch.

        Args:
            x: ids_BT (int64) or the results of the input embedding, embedded_BTH, if `start` is 0; else hidden_BTH.
            cache: KV cache with the earlier positions, which takes these, too. None (training): `x` holds the first positions, and
                nothing is kept.
            attention_mask: Mask of shape (B, past + T); None if nothing is padding.
            position_ids: Positions of `x`; unused if the family takes none.
            keep_last: Number of last positions to return logits for; -1 for all.
            start: First unit; None for the span's first one.
            end: End of the units; None for the span's end.
            adapters: Name of each row's loaded adapter, "" for none; () for the model alone.
            ids_BT: Tokens of `x`, if boundaries have anchors and hidden states are without digits, those of the result as well.

        Returns:
            logits_BKV of the `keep_last` last positions if the range ends with the head, else hidden_BTH. With a reader, the states
            that left the last layer follow each position's logits: (B, K, V + H).

        Raises:
            ProtocolError: An adapter is not loaded, or rows with different ones cannot be told apart in some layer. Or boundaries
                have anchors, and the tokens are not known.
        """
        start = self.start if start is None else start
        end = self.end if end is None else end
        layers = self.layers_of(start, end)
        if self.family.computes_again:
            return self._compute_again(x, cache, start, end, keep_last, adapters)
        if self.family.keeps_states and cache is not None:
            suit_cache(cache, self.family.model_class)
        if attention_mask is not None and not any(self.family.cache_shapes):
            # Nothing looks back over columns: families of this kind expect the new ones alone, and only if one is padding.
            attention_mask = attention_mask[:, -x.shape[1] :]
            attention_mask = None if bool(attention_mask.all()) else attention_mask
        if self.family.calls is None:
            self.stack.select(layers.start, layers.stop)
        self.adapters.choose(adapters, x.shape[1])
        entering_BTH, has_digits = x if start > 0 else None, bool(self.digits) and ids_BT is None
        if has_digits:
            entering_BTH, ids_BT = self.tokens_apart(x, start)
        sent = x
        if start > 0 and self.width != self.hidden_size:  # a family prepares masks by the shape of hidden states
            x = x.new_zeros(()).expand(*x.shape[:2], self.hidden_size)
        inputs: dict[str, Any] = {
            "inputs_embeds" if x.is_floating_point() else "input_ids": x,
            "attention_mask": attention_mask,
            CACHE_ARGUMENT: cache,
            "use_cache": cache is not None,
        }
        if self._accepts_positions:
            inputs["position_ids"] = position_ids
        positions: list[int] | None = None
        if self.has_equal_rows and cache is not None and position_ids is not None:
            positions = position_ids[:, 0].tolist()
        same_bits = SameBits(multiplies=not self.has_equal_rows) if self.has_same_bits else contextlib.nullcontext()
        with same_bits, positions_of_rows(positions):
            if self.family.calls is not None:
                inputs = {name: value for name, value in inputs.items() if name not in ("inputs_embeds", "input_ids")}
                # Layers fill their caches also if no logits are wanted.
                y: Tensor = self.model.carrier.run(sent, start, end, keep_last or 1, cache, inputs)
                return y if keep_last or end < self.family.units else self.empty_logits(len(x))
            if end < self.family.units or keep_last == 0:
                # Modules behind the layers get no positions, if the family allows that.
                none = 0 if self.family.narrows else -1
                _, hidden_BTH = self.stack.pass_through(
                    lambda: self.model.base_model(**inputs), entering_BTH, none, ids_BT
                )
                if end == self.family.units:
                    return self.empty_logits(len(x))
                if not has_digits or ids_BT is None:
                    return hidden_BTH
                return torch.cat([hidden_BTH, digits_of(ids_BT, self.digits).to(hidden_BTH.dtype) / BASE], dim=-1)
            # The family's own final norm, head, scale and caps compute the logits.
            if not self.family.narrows and keep_last > 0:
                inputs["logits_to_keep"], keep_last = keep_last, -1
            output, hidden_BTH = self.stack.pass_through(lambda: self.model(**inputs), entering_BTH, keep_last, ids_BT)
        logits_BKV: Tensor = output.logits
        if self.reader is None:
            return logits_BKV
        hidden_BKH = hidden_BTH[:, hidden_BTH.shape[1] - logits_BKV.shape[1] :]
        return torch.cat([logits_BKV, hidden_BKH.to(logits_BKV.dtype)], dim=-1)

    def tokens_apart(self, x: Tensor, start: int) -> tuple[Tensor | None, Tensor]:
        """Return the code_BTR without digits (None at the model's start) and the tokens ids_BT of inputs of unit `start`.

        Digits that name no token are taken for the nearest one: rows that only stand in may have any.
        """
        if start == 0:
            if x.is_floating_point():
                raise ProtocolError("the model's stages need the tokens themselves: embedded ones do not name them")
            return None, x
        rank = self.width - self.digits
        ids_BT = ids_of((x[..., rank:].float() * BASE).round().clamp(0, BASE - 1))
        return x[..., :rank], ids_BT.clamp(0, self.vocab_size - 1)

    def names_tokens(self, x: Tensor) -> bool:
        """Return whether the digits in hidden states x_BTW name tokens of the vocabulary; True if boundaries have no anchors."""
        if not self.digits:
            return True
        digits_BTD = x[..., self.width - self.digits :].float() * BASE
        whole = (digits_BTD == digits_BTD.round()) & (digits_BTD >= 0) & (digits_BTD < BASE)
        return bool(whole.all()) and bool((ids_of(digits_BTD) < self.vocab_size).all())

    def _compute_again(
        self, x: Tensor, cache: Any, start: int, end: int, keep_last: int, adapters: tuple[str, ...]
    ) -> Tensor:
        """Run units [start, end) on new positions and all before them, of a model that keeps no caches of its own; see `forward`.

        The KV cache keeps the inputs of the range. Rows of one length go together, without their padding.
        """
        count = x.shape[1]
        inputs_RTX, firsts = x, [0] * len(x)
        if cache is not None:
            keys = x[:, None] if x.dim() == 3 else x[:, None, :, None]
            kept = cache.update(keys, keys[..., :0], self.layers_of(start, end + 1).start)[0][:, 0]
            inputs_RTX = kept if x.dim() == 3 else kept[..., 0]
            firsts = cache.first_columns
        has_head = end == self.family.units
        if has_head and not keep_last:
            return self.empty_logits(len(x))
        outputs: dict[int, Tensor] = {}
        for first in dict.fromkeys(firsts):
            rows = [row for row, each in enumerate(firsts) if each == first]
            if first >= inputs_RTX.shape[1]:
                continue  # a row that only stands in
            self.adapters.choose(tuple(adapters[row] for row in rows) if adapters else (), inputs_RTX.shape[1] - first)
            y = self.model.carrier.run(inputs_RTX[rows, first:], start, end, keep_last if has_head else -1)
            outputs.update(zip(rows, y.unbind(), strict=True))
        wanted = keep_last if has_head and keep_last > 0 else count
        width = next(iter(outputs.values())).shape[-1]
        whole = x.new_zeros((len(x), wanted, width), dtype=self.dtype)
        for row, y in outputs.items():
            whole[row, max(0, wanted - len(y)) :] = y[-wanted:]
        return whole

    def empty_logits(self, rows: int) -> Tensor:
        """Return the result of a pass without logits, (B, 0, V or V + H)."""
        width = self.vocab_size + (0 if self.reader is None else self.hidden_size)
        return torch.empty(rows, 0, width, dtype=self.dtype, device=self.device)

    def normed(self, hidden_BTH: Tensor, *, cache: Any) -> Tensor:
        """Return the states that enter the head's matrix, from those that left the last layer: behind the family's final norm."""
        self.stack.select(self.family.layer_count, self.family.layer_count)
        self.adapters.choose((), hidden_BTH.shape[1])
        inputs = {"inputs_embeds": hidden_BTH, CACHE_ARGUMENT: cache, "use_cache": cache is not None}
        output, _ = self.stack.pass_through(lambda: self.model.base_model(**inputs), hidden_BTH)
        normed_BTH: Tensor = output.last_hidden_state
        return normed_BTH


@lean()
def load_model(
    checkpoint: Checkpoint,
    start: int,
    end: int,
    *,
    dtype: torch.dtype | str,
    products: str = PLAIN,
    packed_on: torch.device | str = "cpu",
    expert_slots: int = 0,
    card_experts: int = 0,
) -> Any:
    """Build the family's class with units [start, end) on the CPU. Weights of unchanged dtype are mapped from the files.

    Packed weights are dequantised if `products` is PLAIN; otherwise they stay packed, on device `packed_on`, and multiply
    exactly or fast. Of a layer's packed experts `expert_slots` lie in memory, and others are read when they are needed; 0: all do.
    If `card_experts` are given, so many lie on `packed_on`, and the host computes with the others.

    Raises LocalError if the model lacks these units, CheckpointError if the checkpoint does not fill them.
    """
    family = checkpoint.family
    if not 0 <= start < end <= family.units:
        raise LocalError(f"no units [{start}:{end}): the model has {family.units}")
    own: torch.dtype = checkpoint.dtype
    wanted = own if isinstance(dtype, str) else dtype
    entries = {name: checkpoint.entries[name] for name in checkpoint.tensors_of(start, end)}
    packed = {name: entry for name, entry in entries.items() if products != PLAIN and entry.is_gguf}
    slices = checkpoint.read_slices(entries.keys() - packed.keys())
    device = torch.device(packed_on)
    embedding = f"{family.input_embedding}.weight"
    in_tiers = {name: entry for name, entry in packed.items() if (expert_slots or card_experts) and entry.is_stack}
    whole = {name: entry for name, entry in packed.items() if name not in in_tiers}
    exact = products == EXACT
    held: Packed = read_weights(whole, wanted, exact=exact, looked_up=embedding, device=device)
    if in_tiers and card_experts:
        held = {**held, **read_split(in_tiers, card_experts, expert_slots, wanted, exact=exact, device=device)}
    elif in_tiers:
        held = {**held, **read_slots(in_tiers, expert_slots, wanted, exact=exact)}
    quantised = checkpoint.quantised
    if quantised is not None and products != PLAIN:
        slices, held = read_quantised(quantised, slices, family, wanted, exact=exact)
    elif quantised is not None:
        slices = plain_slices(quantised, slices, quantised.packed & slices.keys())
    model = assemble(family, slices, start, end, dtype=wanted, packed=held)
    if (
        products == FAST and held and device.type == "cpu" and not family.keeps_states
    ):  # states have other bits in chunks
        attend_by_position(model)
    return model
