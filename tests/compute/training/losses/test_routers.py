"""Losses of routers are transformers', whole and in stages, and neither padding nor held-out data have a part in them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

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
from swarmnode.compute.training.losses import busiest_share
from swarmnode.compute.training.recomputation import recompute
from swarmnode.data.rows import NO_LABEL, make_rows
from swarmnode.data.samples import TokenSample
from swarmnode.errors import ProtocolError, UsageError
from swarmnode.swarm.records.run import RECIPE, Recipe, Run
from tests.compute.training.conftest import SAMPLES, commit_all, ids_of, make_run, pass_through
from tests.compute.training.test_packing import EXPERTS, SIZES

FAMILIES = ("qwen3_moe", "mixtral", "granitemoe", "gpt_oss")
BALANCE, Z_LOSS = 0.1, 0.01
RECIPE_OF_ROUTERS = Recipe(router_balance=BALANCE, router_z_loss=Z_LOSS)
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


def expected(checkpoint: Checkpoint, ids_BT: Tensor, labels_BT: Tensor, mask_BT: Tensor | None = None) -> Any:
    """transformers' own model after a backward pass from both losses, and the loss."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path).train()
    output = model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT, output_router_logits=True)
    counted_N = torch.ones(ids_BT.numel(), dtype=torch.bool) if mask_BT is None else mask_BT.flatten().bool()
    logits_NE = torch.cat([one[counted_N] for one in output.router_logits])
    model.zero_grad()
    plain = output.loss - model.router_aux_loss_coef * output.aux_loss
    loss = plain + BALANCE * output.aux_loss + Z_LOSS * logits_NE.logsumexp(-1).square().mean()
    loss.backward()
    return model, float(loss.detach())


def agree(found: dict[str, Tensor], model: Any) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_losses_are_transformers(folder: Path, family: str) -> None:
    checkpoint, ids_BT = saved(folder, family), ids_of(0, 0)
    model, loss = expected(checkpoint, ids_BT, ids_BT)
    run = make_run(schedule=RECIPE, recipe=RECIPE_OF_ROUTERS, batch=SAMPLES)
    for cuts in (WHOLE, CUT):
        chain = chain_of(checkpoint, run, cuts, recompute=cuts is CUT)
        assert pass_through(chain, 0) == pytest.approx(loss, rel=1e-6)
        agree(gradients(chain), model)
    without = chain_of(checkpoint, make_run(batch=SAMPLES), CUT)
    assert pass_through(without, 0) < loss - BALANCE / 2, "another run of the same model has no such loss"
    chain[0].segment.aim(Recipe())
    assert len(chain[0].segment.forward((ids_BT,), 0, 1, 0)) == 1


def test_stages_learn_as_one_process(folder: Path) -> None:
    """Also of several microbatches, and over steps in which routers change."""
    run = make_run(schedule=RECIPE, recipe=RECIPE_OF_ROUTERS)
    whole, cut = (chain_of(saved(folder, "qwen3_moe"), run, cuts) for cuts in (WHOLE, CUT))
    for _step in range(3):
        losses = [[pass_through(chain, index) for index in range(run.microbatches)] for chain in (whole, cut)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        loads = [chain[-1].segment.expert_load for chain in (whole, cut)]
        assert loads[1] == pytest.approx(loads[0]) and 1 < loads[0] <= EXPERTS["num_experts"]
        for chain in (whole, cut):
            commit_all(chain)


def test_padding_is_not_routed_and_held_out_data_have_no_such_loss(folder: Path) -> None:
    checkpoint = saved(folder, "mixtral")
    chance = np.random.default_rng(0)
    tokens = chance.integers(0, 99, 7).tolist()
    batches = SampleBatches(make_rows([TokenSample(tokens, [True] * 7)], LENGTH, pack=True), 99)
    recipe = Recipe(router_balance=BALANCE, router_z_loss=Z_LOSS, evaluate_every=1, evaluation=1)
    run = Run(batches.fingerprint, 2, 1, 1, LENGTH, clip=0.0, schedule=RECIPE, recipe=recipe)
    ids_BT = torch.tensor([tokens + [0] * (LENGTH - 7)])
    mask_BT = torch.tensor([[1] * 7 + [0] * (LENGTH - 7)])
    labels_BT = ids_BT.masked_fill(mask_BT == 0, NO_LABEL)
    model, loss = expected(checkpoint, ids_BT, labels_BT, mask_BT)
    inputs, labels = batches.microbatch(0, 0, run)
    (learner,) = chain_of(checkpoint, run, WHOLE)
    assert float(learner.forward(0, 0, 0, 5, inputs, labels)[0]) == pytest.approx(loss, rel=1e-6)
    learner.backward(0, ())
    agree(gradients([learner]), model)
    load = learner.segment.expert_load
    plain = model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT).loss
    assert float(learner.forward(1, 1, 0, 5, inputs, labels)[0]) == pytest.approx(float(plain.detach()), rel=1e-6)
    assert learner.segment.expert_load == load


def test_what_has_no_routers_or_other_sums_is_refused(folder: Path) -> None:
    run = make_run(schedule=RECIPE, recipe=RECIPE_OF_ROUTERS, batch=SAMPLES)
    checkpoint = saved(folder, "mixtral")
    _, middle, _ = chain_of(checkpoint, run, CUT)
    hidden_BTH, sums_R = middle.segment.dummies(1, 2, LENGTH)[0]
    for sums in ((), (sums_R[1:],), (sums_R.long(),), (sums_R, sums_R), (hidden_BTH,)):
        with pytest.raises(ProtocolError):
            middle.forward(0, 0, 1, 3, (hidden_BTH, *sums))
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).save_pretrained(folder / "llama")
    with pytest.raises(UsageError, match="mixtures of experts"):
        chain_of(Checkpoint(folder / "llama"), run, (0, 4))


def test_a_replica_computes_the_same_sums_again(folder: Path) -> None:
    """So spot checks compare them as all values."""
    run = make_run(schedule=RECIPE, recipe=RECIPE_OF_ROUTERS, batch=SAMPLES)
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
    assert bool(own[1][EXPERTS["num_experts"] :].any()), "the gradient of the sums flows on"
    torch.testing.assert_close(recomputed.gradients, own, rtol=1e-4, atol=1e-7)


def test_the_busiest_experts_share() -> None:
    assert busiest_share(torch.tensor([3.0, 1.0, 0.0, 0.0, *[0.0] * 4, 5.0, 4.0])) == 3.0
    assert busiest_share(torch.tensor([2.0, 2.0, *[0.0] * 4])) == 1.0 and busiest_share(torch.zeros(6)) == 0.0
