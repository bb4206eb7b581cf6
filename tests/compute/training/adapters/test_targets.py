"""Recipes of adapters, and the layers that they name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarmnode.compute.model.assemble import outline
from swarmnode.compute.model.family import family_of
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.compute.training.adapters.layers import check_targets, target_layers
from swarmnode.errors import UsageError
from tests.numerics.families import tiny_config


def layers(name: str, **fields: Any) -> set[str]:
    family = family_of(tiny_config(name))
    recipe = AdapterRecipe(**fields)
    check_targets(family, recipe)
    return set(target_layers(outline(family, 0, family.units, dtype=torch.float32), recipe))


def test_all_linear_layers_but_the_head() -> None:
    found = layers("llama")
    assert len(found) == 4 * 7 and not any("lm_head" in name for name in found)
    assert len(layers("gpt2")) == 4 * 4
    assert {name.rpartition(".")[2] for name in layers("mixtral")} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert layers("llama", method="prompt") == set()


def test_layers_are_named_by_their_ends() -> None:
    assert layers("llama", targets=("1.self_attn.q_proj", "lm_head")) == {"model.layers.1.self_attn.q_proj", "lm_head"}
    assert len(layers("llama", targets=("q_proj",))) == 4


@pytest.mark.parametrize(("family", "target"), [("llama", "proj"), ("mixtral", "gate_up_proj"), ("llama", "norm")])
def test_unknown_layers_are_refused_with_those_there_are(family: str, target: str) -> None:
    with pytest.raises(UsageError, match=f"no linear layer '{target}'.*it has .*q_proj"):
        layers(family, targets=("q_proj", target))


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "ia3"},
        {"rank": 0},
        {"rank": 5000},
        {"alpha": 0.0},
        {"alpha": float("nan")},
        {"targets": "most"},
        {"targets": ()},
        {"targets": ("",)},
        {"prompt_tokens": 0},
        {"betas": (0.9, 1.0)},
        {"weight_decay": -1.0},
        {"clip": float("nan")},
        {"epsilon": float("inf")},
    ],
)
def test_values_out_of_their_bounds_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        AdapterRecipe(**fields)
