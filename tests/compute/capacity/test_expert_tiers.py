"""Tiers of a mixture's weights: what fits into memory, and sentences about it checked by arithmetic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarmnode.compute.capacity.capacity import limit_bytes_for, most_anywhere, unit_sizes
from swarmnode.compute.capacity.expert_tiers import (
    ExpertTier,
    HostMemory,
    active_experts,
    expert_tier,
    whole_model_tier,
)
from swarmnode.compute.expert_slots import buffer_bytes, expected_hits
from swarmnode.compute.packing.tensor_entry import TensorEntry

LAYERS, EXPERTS, ACTIVE, HIDDEN, INNER = 36, 32, 4, 2880, 2880
UNITS, CACHE_TOKENS = LAYERS + 2, 0
EXPERT_BYTES = 3 * HIDDEN * INNER // 32 * 34
LAYER_BYTES = 4096 * HIDDEN // 32 * 34 + EXPERTS * EXPERT_BYTES
END_BYTES = 32_000 * HIDDEN // 32 * 34


def large_mixture(experts_of: Mapping[int, int] = {}) -> Any:
    """Return the headers of a mixture of 36 layers of some 0.9 GB in Q8_0, with an embedding and a head."""
    entries: dict[str, TensorEntry] = {}

    def add(name: str, *shape: int) -> None:
        entries[name] = TensorEntry(Path("model.gguf"), "Q8_0", shape, 0, torch.Size(shape).numel() // 32 * 34)

    add("model.embed_tokens.weight", 32_000, HIDDEN)
    add("lm_head.weight", 32_000, HIDDEN)
    for layer in range(LAYERS):
        experts = experts_of.get(layer, EXPERTS)
        add(f"model.layers.{layer}.self_attn.q_proj.weight", 4096, HIDDEN)
        for number in range(2):
            add(f"model.layers.{layer}.mlp.experts.gate_up_proj/{number}", experts, INNER, HIDDEN)
        add(f"model.layers.{layer}.mlp.experts.down_proj", experts, HIDDEN, INNER)

    def units_of(name: str) -> tuple[int, ...]:
        found = re.search(r"layers\.(\d+)\.", name)
        return (int(found[1]) + 1,) if found else (0,) if "embed" in name else (LAYERS + 1,)

    family = SimpleNamespace(
        units=UNITS, layer_count=LAYERS, units_of_tensor=units_of, planned_bytes_per_token=lambda *_: 1024
    )
    return SimpleNamespace(entries=entries, family=family, config=SimpleNamespace(num_experts_per_tok=ACTIVE))


@pytest.mark.parametrize("limit_gb", [5, 7, 9, 12, 20, 28, 40])
@pytest.mark.parametrize("needed", [UNITS, 20])
def test_the_sentence_says_what_fits(limit_gb: int, needed: int) -> None:
    checkpoint, limit_bytes = large_mixture(), limit_gb * 10**9
    sizes = unit_sizes(checkpoint, dtype=torch.float32, keeps_packed=True)
    found = expert_tier(checkpoint, sizes, limit_bytes, CACHE_TOKENS, needed)
    if found is None:
        assert most_anywhere(sizes, limit_bytes, CACHE_TOKENS) >= needed
        return
    tier, left = found
    told = re.fullmatch(
        r"(\d+) layers of ([\d.]+) MB: memory for (\d+) of (\d+) experts a layer, about (\d+) of 10 found there",
        str(tier),
    )
    assert told is not None, str(tier)
    slots = int(told[3])
    assert (int(told[1]), int(told[4])) == (LAYERS, EXPERTS)
    assert float(told[2]) == pytest.approx(LAYER_BYTES / 1e6, rel=0.01)
    assert int(told[5]) == round(10 * expected_hits(slots, EXPERTS))
    assert sum(left.weight_bytes) == sum(sizes.weight_bytes) - LAYERS * (EXPERTS - slots) * EXPERT_BYTES

    def held(count: int) -> int:
        """Layers that fit anywhere, with so many experts in memory, of those that are needed."""
        ends = END_BYTES, *[LAYER_BYTES - (EXPERTS - count) * EXPERT_BYTES] * LAYERS, END_BYTES
        return min(needed, most_anywhere(replace(sizes, weight_bytes=ends), limit_bytes - buffer_bytes(), CACHE_TOKENS))

    # As many experts as possible: with one more, fewer layers would fit
    assert ACTIVE <= slots < EXPERTS and held(slots) == held(ACTIVE) > 0
    assert held(slots + 1) < held(slots) or slots == EXPERTS - 1
    assert tier.facts()["slots"] == slots
    if needed == UNITS:
        whole = whole_model_tier(checkpoint, sizes, limit_bytes, CACHE_TOKENS)
        assert whole == (tier if held(slots) == UNITS else None), "no machine is said to hold what it does not"


@pytest.mark.parametrize("active", [4, 24])
def test_no_tier_is_taken_that_lets_no_more_layers_fit(active: int) -> None:
    checkpoint, seen = large_mixture(), set[bool]()
    checkpoint.config.num_experts_per_tok = active
    sizes = unit_sizes(checkpoint, dtype=torch.float32, keeps_packed=True)
    smallest = LAYER_BYTES - (EXPERTS - active) * EXPERT_BYTES
    least = replace(sizes, weight_bytes=(END_BYTES, *[smallest] * LAYERS, END_BYTES))
    for limit_bytes in range(5 * 10**8, 4 * 10**9, 10**8):
        whole, held = (
            most_anywhere(sizes, limit_bytes, CACHE_TOKENS),
            most_anywhere(least, limit_bytes - buffer_bytes(), CACHE_TOKENS),
        )
        found = expert_tier(checkpoint, sizes, limit_bytes, CACHE_TOKENS, UNITS)
        assert (found is None) is (0 < held <= whole), limit_bytes
        seen.add(found is None)
    assert seen == ({False} if active == 4 else {False, True})


def test_a_layer_with_fewer_experts_keeps_them_all() -> None:
    checkpoint = large_mixture({3: 5})
    sizes = unit_sizes(checkpoint, dtype=torch.float32, keeps_packed=True)
    found = expert_tier(checkpoint, sizes, 12 * 10**9, CACHE_TOKENS, UNITS)
    assert found is not None and found[0].slots > 5
    assert found[1].weight_bytes[4] == sizes.weight_bytes[4]


def test_dense_models_and_models_that_fit_have_no_tier() -> None:
    checkpoint = large_mixture()
    sizes = unit_sizes(checkpoint, dtype=torch.float32, keeps_packed=True)
    assert expert_tier(checkpoint, sizes, 10**12, CACHE_TOKENS, UNITS) is None
    checkpoint.config.num_experts_per_tok = 0
    assert active_experts(checkpoint.config) == 0
    assert expert_tier(checkpoint, sizes, 9 * 10**9, CACHE_TOKENS, UNITS) is None


@pytest.mark.parametrize("active", ["4", -1, [4], 10**9, None])
def test_a_config_that_contradicts_the_tensors_ends_no_node(active: Any) -> None:
    checkpoint = large_mixture()
    checkpoint.config.num_experts_per_tok = active
    checkpoint.entries["model.embed_tokens.weight"] = TensorEntry(Path("model.gguf"), "Q8_0", (3, 32, 32), 0, 3 * 1088)
    checkpoint.entries["nowhere"] = TensorEntry(Path("model.gguf"), "Q8_0", (3, 32, 32), 0, 3 * 1088)
    checkpoint.family.units_of_tensor = partial(
        lambda known, name: () if name == "nowhere" else known(name), checkpoint.family.units_of_tensor
    )
    sizes = unit_sizes(checkpoint, dtype=torch.float32, keeps_packed=True)
    assert expert_tier(checkpoint, sizes, 9 * 10**9, CACHE_TOKENS, UNITS) is None


def test_a_token_waits_for_what_is_missing() -> None:
    tier = ExpertTier(layers=10, layer_bytes=34e6, expert_bytes=1e6, experts=32, active=4, slots=8)
    missed = 10 * 4 * (1 - expected_hits(8, 32)) * 1e6
    assert tier.missed_bytes == pytest.approx(missed)
    assert tier.token_s(10e9, 1e9) == pytest.approx(10 * 6e6 / 10e9 + missed / 1e9)
    with_head = replace(tier, other_bytes=40_000_000)
    assert with_head.token_s(10e9, 1e9) == pytest.approx(tier.token_s(10e9, 1e9) + 40e6 / 10e9)
    assert expected_hits(32, 32) == expected_hits(40, 32) == 1.0


def test_beside_a_card_the_host_keeps_the_experts() -> None:
    """Of a card with room for 5 experts a layer, and a host with room for all, for 10, and for fewer than a token needs."""
    checkpoint = large_mixture()
    sizes = unit_sizes(checkpoint, dtype=torch.bfloat16, keeps_packed=True)
    stacks = [entry for entry in checkpoint.entries.values() if entry.is_stack]
    each_bytes = sum(entry.nbytes // EXPERTS for entry in stacks)  # of one expert in all layers
    layers = len({name.split(".")[2] for name, entry in checkpoint.entries.items() if entry.is_stack})
    limit_bytes = limit_bytes_for(sizes.need_bytes(0, UNITS, CACHE_TOKENS) - (EXPERTS - 5) * each_bytes)
    for host_slots in (EXPERTS, 10, 3):
        host_bytes = host_slots * each_bytes + 2 * buffer_bytes() + 100
        found = expert_tier(checkpoint, sizes, limit_bytes, CACHE_TOKENS, UNITS, host_bytes=host_bytes)
        if host_slots < 4:
            assert found is None
            continue
        assert found is not None
        tier, left = found
        assert (tier.slots, tier.host_slots) == (5, host_slots)
        assert sum(sizes.weight_bytes) - sum(left.weight_bytes) == (EXPERTS - 5) * each_bytes
        assert tier.host_bytes(UNITS) == pytest.approx(host_bytes, abs=200)
        assert "room on the card for 5 of" in str(tier) and ("with all in" in str(tier)) == (host_slots == EXPERTS)
        assert (tier.others == "") == (host_slots == EXPERTS) == (tier.missed_bytes == 0)
        says = whole_model_tier(checkpoint, sizes, limit_bytes, CACHE_TOKENS, HostMemory(host_bytes))
        assert says == tier
        cold_s = layers * 4 * (1 - tier.hits) * tier.expert_bytes / 1e9
        assert tier.token_s(1e12, 1e30, 1e9) == pytest.approx(cold_s, rel=1e-3), "the CPU's share takes longest"
    fixed = expert_tier(
        checkpoint, sizes, limit_bytes, CACHE_TOKENS, UNITS, host_bytes=host_bytes * EXPERTS, is_fixed=True
    )
    assert fixed is not None and fixed[0].hits == 5 / EXPERTS
