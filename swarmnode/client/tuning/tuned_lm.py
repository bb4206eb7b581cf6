"""Adapter of a swarm's model as a torch module: its parameters are here, and the swarm computes the loss and its gradients.

It trains as any module: in a loop with an optimiser of torch, or under transformers' Trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from swarmnode.compute.training.adapters.labelled_positions import count_labels
from swarmnode.compute.training.adapters.layers import file_name
from swarmnode.compute.training.adapters.recipe import AdapterRecipe
from swarmnode.compute.training.adapters.saved_folder import save_adapter
from swarmnode.data.rows import NO_LABEL
from swarmnode.errors import UsageError
from swarmnode.tuning.client.remote_gradients import RemoteGradients
from swarmnode.tuning.client.tuned_route import TunedMicrobatch

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Function that runs a coroutine on the client's loop and returns its result"""


class TunedCausalLM(nn.Module):
    """Adapter of a swarm's language model, with float32 parameters. `forward` returns a loss that supports `backward`."""

    def __init__(self, run: Run, remote: RemoteGradients, recipe: AdapterRecipe, config: Any, base: str) -> None:
        """Open the adapter by `remote`. Raises NoRoute, Busy, UsageError."""
        super().__init__()
        self.config = config
        self.recipe = recipe
        self._run, self._remote, self._base = run, remote, base
        self._names = []
        for name, tensor in run(remote.start()).items():
            self._names.append(name)
            self.register_parameter(name.replace(".", "/"), nn.Parameter(tensor))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **_unused: Any,
    ) -> CausalLMOutput:
        """Return the mean loss over labels, or their sum divided by `num_items_in_batch`, as transformers' models do.

        Args:
            input_ids: ids_BT (int64).
            attention_mask: (B, T), 0 for padding, which must be on the right. It has no labels.
            labels: ids_BT, -100 for positions without a label; by default `input_ids`.
            num_items_in_batch: Number of labels of the whole step, if it has several microbatches.

        Returns:
            An output with `loss` alone: logits do not leave the swarm.

        Raises:
            UsageError: The padding is on the left.
            NotFinite: The loss is NaN or infinite.
        """
        labels_BT = (input_ids if labels is None else labels).detach().cpu()
        if attention_mask is not None:
            if bool((attention_mask[:, :-1] < attention_mask[:, 1:]).any()):
                raise UsageError("padding on the left cannot be tuned: set the tokenizer's padding_side to right")
            labels_BT = labels_BT.masked_fill(attention_mask.cpu() == 0, NO_LABEL)
        count = int(num_items_in_batch or count_labels(labels_BT, self.recipe.prompt_positions))
        learns = torch.is_grad_enabled() and any(one.requires_grad for one in self.parameters())
        given = TunedMicrobatch(0, (input_ids.detach().cpu(),), (labels_BT,), 1 / max(1, count), learns)
        loss: Tensor = _Loss.apply(self, given, *self.parameters())  # type: ignore[no-untyped-call]
        return CausalLMOutput(loss=loss)

    def save_pretrained(self, folder: str | Path, **_unused: Any) -> None:
        """Write the adapter as peft does. Raises LocalError if it cannot be written."""
        named = zip(self._names, self.parameters(), strict=True)
        save_adapter(Path(folder), self.recipe, {file_name(name): one for name, one in named}, base=self._base)

    def close(self) -> None:
        """Free the adapter at the hops. A later `forward` opens it again."""
        self._run(self._remote.close())

    def compute(self, given: TunedMicrobatch) -> tuple[float, list[Tensor]]:
        """Have the swarm compute a microbatch. Returns the loss, and the gradient of each parameter if it learns."""
        weights = {name: one.detach().cpu() for name, one in zip(self._names, self.parameters(), strict=True)}
        loss, gradients = self._run(self._remote.compute(weights, [given]))
        return loss, [gradients[name] for name in self._names] if given.learns else []


class _Loss(torch.autograd.Function):
    """Loss of a microbatch. The gradients come with it, so `backward` only scales them."""

    @staticmethod
    def forward(ctx: Any, module: TunedCausalLM, given: TunedMicrobatch, *parameters: Tensor) -> Tensor:
        loss, gradients = module.compute(given)
        ctx.save_for_backward(*(one.to(like) for one, like in zip(gradients, parameters, strict=False)))
        return torch.tensor(loss, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradients[0] * one for one in ctx.saved_tensors)
