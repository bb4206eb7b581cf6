"""Adapters trained on spans have the losses of peft's in one process, and the folders that are saved load in both."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmnode.compute.model.adapters.adapter_file import adapter_in
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.adapters.adapter_recipe import METHODS
from swarmnode.compute.training.adapters.saved_folder import save_adapter
from tests.compute.training.adapters.trained import SMALL, Route, batch_of
from tests.numerics.adapter_peft import PeftTraining, saved_difference
from tests.numerics.families import tiny_config
from tests.numerics.test_adapters import use

STEPS = 20
RATES = {"lora": 5e-3, "lora-fa": 5e-3, "dora": 5e-3, "prompt": 3e-2}
LOSS_TOLERANCE = 1e-4  # relative
LOGIT_TOLERANCE = 1e-4  # of the logits' standard deviation
FAMILIES = ("llama", "qwen3", "gpt2", "gemma3_text", "mixtral")
WEIGHT_DEVIATION = 0.15  # at transformers' 0.02 tiny models hardly learn
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


def save_family(name: str, folder: Path) -> tuple[Any, Checkpoint]:
    """A tiny model of a family, and its checkpoint."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, WEIGHT_DEVIATION)
    model.save_pretrained(folder)
    return model, Checkpoint(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Checkpoint]:
    return save_family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("method", METHODS)
def test_spans_train_as_the_whole_model_does(family: tuple[Any, Checkpoint], method: str) -> None:
    """The loss falls, and cuts do not change it."""
    model, checkpoint = family
    if model.config.model_type != "llama" and method in ("lora-fa", "dora"):
        pytest.skip("these change the same layers as LoRA does, which one family shows")
    recipe = replace(SMALL, method=method)
    one, other = (
        Route.through(checkpoint, cuts, recipe).train(range(5), RATES[method])
        for cuts in ([0, checkpoint.units], [0, 2, 4, checkpoint.units])
    )
    assert other == pytest.approx(one, rel=1e-6)
    assert one[4] < one[0]  # on the same data


@needs_peft
@pytest.mark.parametrize("method", METHODS)
def test_losses_and_logits_are_those_of_peft(family: tuple[Any, Checkpoint], method: str, tmp_path: Path) -> None:
    model, checkpoint = family
    recipe, rate = replace(SMALL, method=method), RATES[method]
    route = Route.through(checkpoint, [0, 2, 4, checkpoint.units], recipe)
    starts = {name: tensor.clone() for name, tensor in route.weights().items()}
    theirs = PeftTraining(model, recipe, starts, rate, tmp_path / "start")
    ours = route.train(range(STEPS), rate)
    assert ours == pytest.approx(theirs.train(range(STEPS)), rel=LOSS_TOLERANCE)
    assert saved_difference(model, route, theirs, batch_of(0)[0][0], tmp_path / "end") < LOGIT_TOLERANCE


@pytest.mark.parametrize("method", ["lora", "lora-fa", "dora"])
def test_a_saved_adapter_is_served_as_it_was_trained(method: str, tmp_path: Path) -> None:
    _, checkpoint = save_family("gpt2", tmp_path / "model")
    route = Route.through(checkpoint, [0, 3, checkpoint.units], replace(SMALL, method=method, rslora=True))
    route.train(range(3))
    save_adapter(tmp_path / "out", route.recipe, route.weights(), base="model")
    x = ids_BS = batch_of(0)[0][0]
    for trainer in route.trainers:
        use(trainer.span, "saved", adapter_in(tmp_path / "out"))
        x = trainer.span.forward(x, cache=None, adapters=("saved",) * len(x))
    wanted = route.logits(ids_BS)
    assert float((x - wanted).abs().max()) < LOGIT_TOLERANCE * float(wanted.std())
