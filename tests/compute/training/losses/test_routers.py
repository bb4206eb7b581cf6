"""Losses of routers are transformers', of each layer or of all, whole and in stages. Padding and held-out data have none."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.datasets.batches import SampleBatches
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.losses import busiest_share, router_losses, router_sums
from swarmnode.compute.training.recomputation import recompute
from swarmnode.data.rows import NO_LABEL, make_rows
from swarmnode.data.samples import TokenSample
from swarmnode.errors import ProtocolError, UsageError
from swarmnode.swarm.records.run import RECIPE, Recipe, Run, check_run
from tests.compute.training.conftest import SAMPLES, commit_all, ids_of, make_run, pass_through
from tests.compute.training.test_packing import EXPERTS, SIZES

FAMILIES = ("qwen3_moe", "mixtral", "granitemoe", "gpt_oss")
BALANCE, Z_LOSS = 0.1, 0.01
RECIPE_OF_ROUTERS = Recipe(router_balance=BALANCE, router_z_loss=Z_LOSS, balance_by_layer=True)
OF_ALL_LAYERS = Recipe(router_balance=BALANCE, router_z_loss=Z_LOSS)  # as earlier versions and transformers have it
RECIPES = {"by layer": RECIPE_OF_ROUTERS, "all layers": OF_ALL_LAYERS}
by_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
WHOLE, CUT = (0, 5), (0, 1, 3, 5)
LENGTH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixtures")


def saved(folder: Path, family: str) -> Checkpoint:
    """A tiny model of three layers; the second one of a Qwen has no experts."""
    path = folder / family
    if not path.exists():
        sizes = {**SIZES, **EXPERTS, "num_hidden_layers": 3, "vocab_size": 99, "head_dim": 8}
        more = {"mlp_only_layers": [1]} if family.startswith("qwen") else {}
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **more}))
        model.float().save_pretrained(path)
    return Checkpoint(path)


def chain_of(checkpoint: Checkpoint, run: Run, cuts: tuple[int, ...], **options: Any) -> list[Learner]:
    return [Learner(load_segment(checkpoint, start, end), run, **options) for start, end in pairwise(cuts)]


def gradients(chain: list[Learner]) -> dict[str, Tensor]:
    blocks = [learner.block(number) for learner in chain for number in learner.blocks if number >= 0]
    return {
        name: one.grad.clone() for block in blocks for name, one in block.parameters.items() if one.grad is not None
    }


def expected(
    checkpoint: Checkpoint, recipe: Recipe, ids_BT: Tensor, labels_BT: Tensor, mask_BT: Tensor | None = None
) -> Any:
    """transformers' own model after a backward pass from both losses, and the loss."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path).train()
    output = model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT, output_router_logits=True)
    counted_N = torch.ones(ids_BT.numel(), dtype=torch.bool) if mask_BT is None else mask_BT.flatten().bool()
    logits_NE = torch.cat([one[counted_N] for one in output.router_logits])
    model.zero_grad()
    plain, balance = output.loss - model.router_aux_loss_coef * output.aux_loss, output.aux_loss
    if recipe.balance_by_layer:
        balance_of = sys.modules[type(model).__module__].load_balancing_loss_func
        experts, top_k = EXPERTS["num_experts"], model.config.num_experts_per_tok
        each = [balance_of((logits_NE,), experts, top_k, mask_BT) for logits_NE in output.router_logits]
        balance = sum(each) / len(each)
    loss = plain + BALANCE * balance + Z_LOSS * logits_NE.logsumexp(-1).square().mean()
    loss.backward()
    return model, float(loss.detach())


def agree(found: dict[str, Tensor], model: Any) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=2e-6, msg=name)


@by_recipe
@pytest.mark.parametrize("family", FAMILIES)
def test_the_losses_are_transformers(folder: Path, family: str, recipe: Recipe) -> None:
    checkpoint, ids_BT = saved(folder, family), ids_of(0, 0)
    model, loss = expected(checkpoint, recipe, ids_BT, ids_BT)
    run = make_run(schedule=RECIPE, recipe=recipe, batch=SAMPLES)
    for cuts in (WHOLE, CUT):
        chain = chain_of(checkpoint, run, cuts, recompute=cuts is CUT)
        assert pass_through(chain, 0) == pytest.approx(loss, rel=1e-6)
        agree(gradients(chain), model)
    without = chain_of(checkpoint, make_run(batch=SAMPLES), CUT)
    assert pass_through(without, 0) < loss - BALANCE / 2, "another run of the same model has no such loss"
    chain[0].segment.aim(Recipe())
    assert len(chain[0].segment.forward((ids_BT,), 0, 1, 0)) == 1


@by_recipe
def test_stages_learn_as_one_process(folder: Path, recipe: Recipe) -> None:
    """Also of several microbatches, and over steps in which routers change."""
    run = make_run(schedule=RECIPE, recipe=recipe)
    whole, cut = (chain_of(saved(folder, "qwen3_moe"), run, cuts) for cuts in (WHOLE, CUT))
    for _step in range(3):
        losses = [[pass_through(chain, index) for index in range(run.microbatches)] for chain in (whole, cut)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        loads = [chain[-1].segment.expert_load for chain in (whole, cut)]
        assert loads[1] == pytest.approx(loads[0]) and 1 < loads[0] <= EXPERTS["num_experts"]
        for chain in (whole, cut):
            commit_all(chain)


@by_recipe
def test_padding_is_not_routed_and_held_out_data_have_no_such_loss(folder: Path, recipe: Recipe) -> None:
    checkpoint = saved(folder, "mixtral")
    chance = np.random.default_rng(0)
    tokens = chance.integers(0, 99, 7).tolist()
    batches = SampleBatches(make_rows([TokenSample(tokens, [True] * 7)], LENGTH, pack=True), 99)
    recipe = msgspec.structs.replace(recipe, evaluate_every=1, evaluation=1)
    run = Run(batches.fingerprint, 2, 1, 1, LENGTH, clip=0.0, schedule=RECIPE, recipe=recipe)
    ids_BT = torch.tensor([tokens + [0] * (LENGTH - 7)])
    mask_BT = torch.tensor([[1] * 7 + [0] * (LENGTH - 7)])
    labels_BT = ids_BT.masked_fill(mask_BT == 0, NO_LABEL)
    model, loss = expected(checkpoint, recipe, ids_BT, labels_BT, mask_BT)
    inputs, labels = batches.microbatch(0, 0, run)
    (learner,) = chain_of(checkpoint, run, WHOLE)
    assert float(learner.forward(0, 0, 0, 5, inputs, labels)[0]) == pytest.approx(loss, rel=1e-6)
    learner.backward(0, ())
    agree(gradients([learner]), model)
    load = learner.segment.expert_load
    plain = model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT).loss
    assert float(learner.forward(1, 1, 0, 5, inputs, labels)[0]) == pytest.approx(float(plain.detach()), rel=1e-6)
    assert learner.segment.expert_load == load


@by_recipe
def test_what_has_no_routers_or_other_sums_is_refused(folder: Path, recipe: Recipe) -> None:
    run = make_run(schedule=RECIPE, recipe=recipe, batch=SAMPLES)
    checkpoint = saved(folder, "mixtral")
    _, middle, _ = chain_of(checkpoint, run, CUT)
    hidden_BTH, sums_S = middle.segment.dummies(1, 2, LENGTH)[0]
    for sums in ((), (sums_S[1:],), (sums_S.long(),), (sums_S, sums_S), (hidden_BTH,)):
        with pytest.raises(ProtocolError):
            middle.forward(0, 0, 1, 3, (hidden_BTH, *sums))
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).save_pretrained(folder / "llama")
    with pytest.raises(UsageError, match="mixtures of experts"):
        chain_of(Checkpoint(folder / "llama"), run, (0, 4))


@by_recipe
def test_a_replica_computes_the_same_sums_again(folder: Path, recipe: Recipe) -> None:
    """So spot checks compare them as all values."""
    run = make_run(schedule=RECIPE, recipe=recipe, batch=SAMPLES)
    chain = chain_of(saved(folder, "mixtral"), run, CUT)
    ids_BT = ids_of(0, 0)
    crossed: list[Any] = [(ids_BT,)]
    for learner in chain:
        crossed.append(learner.forward(0, 0, learner.segment.start, learner.segment.end, crossed[-1], (ids_BT,)))
    returned = [(), *(learner.backward(0, ()) for learner in chain[-1:])]
    again = DeviceLearners(chain[1:2], chain[1].segment)
    values = tuple(value.clone() for value in crossed[1])
    recomputed = recompute(again, 0, 1, 3, values, (), returned[1], bytes(16))
    own = chain[1].backward(0, returned[1])
    assert len(recomputed.outputs) == len(own) == 2 and torch.equal(recomputed.outputs[1], crossed[2][1])
    assert bool(own[1].any()), "the gradient of the sums flows on"
    torch.testing.assert_close(recomputed.gradients, own, rtol=1e-4, atol=1e-7)


def test_the_busiest_experts_share() -> None:
    assert busiest_share(torch.tensor([3.0, 1.0, 0.0, 0.0, *[0.0] * 4, 5.0, 4.0])) == 3.0
    assert busiest_share(torch.tensor([2.0, 2.0, *[0.0] * 4])) == 1.0 and busiest_share(torch.zeros(6)) == 0.0


@pytest.mark.parametrize("skew", [0, 1, 2, 3])
def test_layers_with_opposite_favourites_cost_something(skew: int) -> None:
    """Each of four layers sends all tokens to an expert of its own: the sum over layers is even, each layer is as bad as can be."""
    favourites_LE = 20 * torch.eye(4).roll(skew, 1)
    layers = [router_sums(favourites_E.expand(8, 4), 1) for favourites_E in favourites_LE]
    together = router_losses(torch.stack(layers).sum(0))[0]
    each = [router_losses(sums_R)[0] for sums_R in layers]
    assert float(together) == pytest.approx(1, abs=1e-6), "all layers together look balanced"
    assert [float(one) for one in each] == pytest.approx([4.0] * 4), "the number of experts, which is the largest loss"


def test_a_recipe_says_how_layers_are_balanced() -> None:
    """Runs of earlier versions keep their ids, and nothing is balanced layer by layer that is not balanced."""
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(OF_ALL_LAYERS))
    assert "balance_by_layer" not in old and msgspec.convert(old, Recipe) == OF_ALL_LAYERS
    for recipe in (Recipe(balance_by_layer=True), Recipe(router_balance=0.1, balance_by_layer=False)):
        with pytest.raises(UsageError, match="layer by layer"):
            check_run(make_run(schedule=RECIPE, recipe=recipe))
