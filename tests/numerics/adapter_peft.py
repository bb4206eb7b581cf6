"""The same training by peft, in one process and in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.compute.training.adapters.layers import PROMPT
from swarmnode.compute.training.adapters.saved_folder import save_adapter
from swarmnode.data.rows import NO_LABEL
from tests.compute.training.adapters.trained import Batch, Route, batch_of, labels_of


def saved_difference(model: Any, route: Route, theirs: PeftTraining, ids_BS: Tensor, folder: Path) -> float:
    """Save an adapter, load it with peft, and return the largest difference of its logits from those that the spans serve, over
    their standard deviation. No span serves a soft prompt: there it is the difference from peft's own training."""
    peft = pytest.importorskip("peft")
    save_adapter(folder, route.recipe, route.weights(), base="model")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
    with torch.no_grad():
        wanted = loaded(input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS)).logits
        found = theirs.logits(ids_BS) if route.recipe.method == "prompt" else route.logits(ids_BS)
    return float((found - wanted).abs().max() / wanted.std())


class PeftTraining:
    """A copy of `model` with peft's adapter, which starts from the tensors `starts`."""

    def __init__(self, model: Any, recipe: AdapterRecipe, starts: dict[str, Tensor], rate: float, folder: Path) -> None:
        self.recipe = recipe
        self.model = self._adapted(copy.deepcopy(model), starts, folder)
        self.optimizer = self._optimizer(rate)

    def _adapted(self, model: Any, starts: dict[str, Tensor], folder: Path) -> Any:
        peft = pytest.importorskip("peft")
        if self.recipe.method != "prompt":
            save_adapter(folder, self.recipe, starts, base="model")
            return peft.PeftModel.from_pretrained(model, folder, is_trainable=True).eval()
        tokens = self.recipe.prompt_tokens
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=tokens)
        adapted = peft.get_peft_model(model, config).eval()
        adapted.prompt_encoder["default"].embedding.weight.data.copy_(starts[PROMPT])
        return adapted

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _optimizer(self, rate: float) -> Any:
        recipe = self.recipe
        if recipe.method == "lora-fa":
            lorafa = pytest.importorskip("peft.optimizers.lorafa")
            lorafa.is_bf16_available = lambda: False  # it would round the corrected gradients
            optimizer = lorafa.create_lorafa_optimizer(self.model, recipe.rank, recipe.alpha, rate)
            for group in optimizer.param_groups:
                group["eps"] = recipe.epsilon
            return optimizer
        return torch.optim.AdamW(self._parameters, lr=rate, betas=recipe.betas, eps=recipe.epsilon, weight_decay=0.0)

    def logits(self, ids_BS: Tensor) -> Tensor:
        logits_BTV: Tensor = self.model(input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS)).logits
        return logits_BTV

    def train(self, steps: range, data: Callable[[int], Batch] = batch_of) -> list[float]:
        """The mean losses of the labelled tokens."""
        return [self._step(data(step)) for step in steps]

    def _step(self, batch: Batch) -> float:
        count, total = labels_of(batch, self.recipe), 0.0
        self.optimizer.zero_grad()
        for ids_BS, labels_BS in batch:
            logits_BTV = self.logits(ids_BS)
            prompt = logits_BTV.shape[1] - ids_BS.shape[1]
            next_BT = functional.pad(labels_BS, (prompt, 0), value=NO_LABEL)[:, 1:]
            loss = (
                functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), next_BT.flatten(), reduction="sum") / count
            )
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._parameters, self.recipe.clip)
        self.optimizer.step()
        return total
