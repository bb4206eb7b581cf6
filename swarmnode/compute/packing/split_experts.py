"""Experts of mixtures that are larger than a card: some lie in slots on the card, and all in the host's memory or on its disk.

A pass multiplies the rows of the experts on the card there, and meanwhile those of the others by the CPU. For a few rows that
takes less time than to move an expert to the card (Fiddler, arXiv 2402.07033). The experts on the card follow their use: in each
layer the most used of those that a pass missed is read from the file, and takes the slot of the least used one there, if that was
used less. Card and CPU give other bits. So for exact products, and if some experts are on the disk, those on the card are the
first ones by their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.packing.ggml_matrix import by_expert
from swarmnode.compute.packing.packed_weight import (
    CPU,
    Block,
    PackedStack,
    SlotStack,
    linear,
    matrices_of,
    read_slots,
    read_weights,
    result_of_expert,
    sum_of_choices,
    visits,
)
from swarmnode.compute.packing.tensor_entry import TensorEntry
from swarmnode.compute.stopwatch import Clock, best_s

ON_CARD_AND_HOST = "on_card_and_host"  # the implementation of experts that computes some by the CPU


class SplitStack(SlotStack):
    """Matrices (N, O, I) of a layer's N experts that stay packed: some lie in slots on a card (`on_card`), all in `host`."""

    def __init__(self, on_card: SlotStack, host: PackedStack) -> None:
        super().__init__(on_card._matrices, on_card.pool, on_card.layer)
        self.host = host
        self.biases: tuple[Tensor, ...] = ()  # of the layer, in the host's memory

    @property
    def implementation(self) -> tuple[str, Callable[..., Tensor]]:
        """Name and function of the implementation of transformers' experts interface that multiplies with these matrices."""
        return ON_CARD_AND_HOST, experts_on_card_and_host

    def times(self, x_RI: Tensor, number: int, slot: int) -> Tensor:
        """Return y (R, O) for x (R, I) on the card and one expert in a slot. On the way back of a gradient another one may be
        there, so that the host's matrix is taken."""

        def blocks() -> Iterator[Block]:
            for outputs, inputs, block in self.host.blocks_of(number):
                yield outputs, inputs, block.to(x_RI.device)

        return linear(x_RI, self._matrices[slot], blocks=blocks)


def read_split(
    entries: Mapping[str, TensorEntry],
    card_slots: int,
    host_slots: int,
    dtype: torch.dtype,
    *,
    exact: bool,
    device: torch.device,
) -> dict[str, SplitStack]:
    """Return the stacks of these experts' packed tensors (N, O, I), by the names of their parameters, with `card_slots` experts of
    each layer on the card `device`, and memory for `host_slots` in the host; 0: all.

    Raises CheckpointError if a file cannot be read, WeightsLost or LocalError if the disk fails or is too slow.
    """
    host: Mapping[str, Any] = (
        read_slots(entries, host_slots, dtype, exact=exact)
        if host_slots
        else read_weights(entries, dtype, exact=exact, looked_up="")
    )
    on_card = read_slots(entries, card_slots, dtype, exact=exact, device=device)
    stacks = {name: SplitStack(stack, host[name]) for name, stack in on_card.items()}
    pool = next(iter(on_card.values())).pool
    # Both memories together hold the most if an expert on the card never needs to come back.
    pool.is_fixed, pool.is_on_card = exact or host_slots > 0, True
    in_slots = [stack.host for stack in stacks.values() if isinstance(stack.host, SlotStack)]
    for stack in in_slots:
        stack.layer.elsewhere = min(card_slots, stack.layer.experts)
    try:
        for layer in pool.layers:
            layer.fill()
    except BaseException:
        for one in {pool, *(stack.pool for stack in in_slots)}:
            one.close()
        raise
    return stacks


def experts_on_card_and_host(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **_: Any
) -> Tensor:
    """Return the weighted sums (N, H) of the experts that each row of `top_k_index` (N, K) chooses, all three on a card.

    It is an implementation for transformers' experts interface: `self` is the family's module of all experts, whose matrices are in
    split stacks.
    """
    stacks, biases = matrices_of(self)
    host = [stack.host for stack in stacks if isinstance(stack, SplitStack)]
    down: SplitStack = self.down_proj
    activate = self._apply_gate if self.has_gate else self.act_fn
    # The host waits for the card here and nowhere else.
    index_NK, x_NH = top_k_index.cpu(), hidden_states.cpu()
    if biases and not down.biases:
        down.biases = tuple(bias.detach().cpu() for bias in biases)
    # Sort the choices by expert, and the experts by their place.
    choices = by_expert(torch.arange(index_NK.numel()), index_NK)[0]
    rows = {number: chosen // index_NK.shape[1] for number, chosen in choices.items()}
    slots = down.layer.found({number: len(each) for number, each in rows.items()}, index_NK.shape[1])
    hot, cold = ([number for number in rows if (number in slots) == is_hot] for is_hot in (True, False))
    results: list[Tensor] = []
    # The card begins with its experts.
    if hot:
        x_SH = hidden_states[torch.cat([rows[number] for number in hot]).to(hidden_states.device)]
        inputs = zip(hot, x_SH.split([len(rows[number]) for number in hot]), strict=True)
        results += [result_of_expert(self, (stacks, biases), one, slots[one], x_RH, activate) for one, x_RH in inputs]
    # Meanwhile the CPU computes the others.
    if cold:
        computed: dict[int, Tensor] = {
            number: result_of_expert(self, (host, down.biases), number, slot, x_NH[rows[number]].float(), activate)
            for number, slot in visits(host, {number: len(rows[number]) for number in cold}, index_NK.shape[1])
        }
        results.append(torch.cat([computed[number] for number in cold]).to(x_NH.dtype).to(hidden_states.device))
    back_S = torch.cat([choices[number] for number in (*hot, *cold)]).argsort()
    results_SH = torch.cat(results)[back_S.to(hidden_states.device)]
    return sum_of_choices(self, results_SH, top_k_weights).to(hidden_states.dtype)


def time_of_expert_s(stacks: Sequence[SplitStack], positions: int, clock: Clock) -> float:
    """Measure the seconds of one expert's products by the CPU in a pass of `positions` new positions. `stacks` are a span's."""
    layer = stacks[0].layer
    rows = math.ceil(positions * layer.pool.active / layer.experts)
    work = [(stack.host, torch.zeros(rows, stack.shape[2])) for stack in stacks if stack.layer is layer]
    return best_s(lambda: [host.times(x_RI, 0, 0) for host, x_RI in work], CPU, clock)
