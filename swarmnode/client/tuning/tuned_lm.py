"""A swarm's language model as a transformers model that trains: an adapter's parameters are here, the swarm computes the layers.

It trains in a loop with an optimiser of torch, under transformers' Trainer, and under trl's SFTTrainer. The embedding and the head
run in this process, so that logits come out, and token ids and labels stay here. Without them the swarm computes the loss alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from swarmnode.client.tuning.client import ModuleParts
from swarmnode.compute.training.adapters.adapter_recipe import NO_METHOD
from swarmnode.compute.training.adapters.held_ends import HeldEnds, LabelledPositions, count_labels
from swarmnode.compute.training.adapters.saved_folder import save_adapter, save_parameters
from swarmnode.compute.training.lm import can_pack
from swarmnode.compute.training.segment import Values
from swarmnode.data.rows import NO_LABEL
from swarmnode.errors import UsageError
from swarmnode.tuning.client.remote_layers import PendingPass
from swarmnode.tuning.client.state_shapes import filed
from swarmnode.tuning.client.tuned_route import TunedMicrobatch

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Function that runs a coroutine on the client's loop and returns its result"""


class SwarmBackbone(nn.Module):
    """Model without its head's matrix: embedding and final norm here, the layers in the swarm, the adapter's float32 parameters.

    `adapter` holds the parameters, each under its path in peft's names.
    """

    def __init__(self, run: Run, parts: ModuleParts) -> None:
        """Make the backbone. Without weights to begin with, the adapter is opened for those of its recipe."""
        super().__init__()
        self.ends, self.recipe, weights = parts.ends, parts.settings.recipe, parts.weights
        self._size = (parts.settings.rows, parts.positions)
        self._config = parts.family.config
        self._run, self._layers = run, parts.layers
        here = {} if self.ends is None else self.ends.starts()
        if weights is None:
            weights = {**here, **(self._run(self._layers.start()) if self.recipe.method != NO_METHOD else {})}
        own = frozenset() if self.ends is None else self.ends.trained
        self.adapter = nn.Module()
        self._parameters_of: dict[str, nn.Parameter] = {}
        for name in sorted(weights.keys() - (here.keys() - own)):
            self._parameters_of[name] = parameter = nn.Parameter(weights[name].float())
            module = self.adapter
            # Register the parameter under its dotted path; modules on the way are made.
            *path, last = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, parameter)
        self._there = sorted(self._parameters_of.keys() - own)
        if self.ends is not None:
            self.ends.use({**here, **self._parameters_of})

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapter's trained parameters, by the names of a folder that peft saves without its prefix."""
        return dict(self._parameters_of)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        **_unused: Any,
    ) -> BaseModelOutput:
        """Return the states behind the final norm, hidden_BTH, without those of a soft prompt. Arguments as of `TunedCausalLM`."""
        hidden_BTH = self.states(input_ids, attention_mask, inputs_embeds, position_ids)
        assert self.ends is not None
        return BaseModelOutput(last_hidden_state=self.ends.normed(hidden_BTH)[:, self.recipe.prompt_positions :])

    def states(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Return the states hidden_BTH that leave the swarm's last layer; those of a soft prompt come first."""
        if self.ends is None:
            raise UsageError(
                "the head is in the swarm, so there are no states or logits here: leave out hold_ends=False"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise UsageError("give input_ids or inputs_embeds, one of the two")
        x = input_ids if inputs_embeds is None else inputs_embeds
        assert x is not None
        self.check(x, attention_mask)
        places = self._places(x, position_ids)
        hidden_BTH = self.ends.enter(x, *(places or (None,)))
        given = [self._parameters_of[name] for name in self._there]
        learns = torch.is_grad_enabled() and any(one.requires_grad for one in (hidden_BTH, *given))
        states_BTH: Tensor = _Layers.apply(self, places, learns, hidden_BTH, *given)  # type: ignore[no-untyped-call]
        return states_BTH

    def check(self, x: Tensor, attention_mask: Tensor | None) -> None:
        """Raise UsageError if a batch is larger than asked for, has other ids than the model, or is padded on the left."""
        rows, positions = self._size
        if x.dim() < 2 or x.shape[0] > rows or x.shape[1] > positions or not x.numel():
            shape = "x".join(map(str, x.shape[:2]))
            raise UsageError(
                f"a batch of {shape}, but the model takes up to {rows} rows of {positions} tokens: ask for more"
            )
        vocabulary = int(self._config.vocab_size)
        if not x.is_floating_point() and not 0 <= int(x.min()) <= int(x.max()) < vocabulary:
            raise UsageError(f"ids from {int(x.min())} to {int(x.max())}, but the model's vocabulary has {vocabulary}")
        if attention_mask is not None and bool((attention_mask[:, :-1] < attention_mask[:, 1:]).any()):
            raise UsageError("padding on the left cannot be trained: set the tokenizer's padding_side to right")

    def _places(self, x: Tensor, position_ids: Tensor | None) -> Values:
        """Return the positions of rows of several documents as the only value, none if each row is one document."""
        if position_ids is None or bool((position_ids == torch.arange(x.shape[1], device=x.device)).all()):
            return ()
        if self.recipe.prompt_positions or not can_pack(self._config, x.shape[1]):
            raise UsageError("the model takes rows of one document each: pad them, without packing and position_ids")
        return (position_ids.detach().cpu(),)

    def close(self) -> None:
        """Free the adapter at the hops. A later pass opens it again."""
        self._run(self._layers.close())

    # -- the swarm's side

    def weights(self) -> dict[str, Tensor]:
        """Return the adapter's weights in the swarm's layers."""
        return {name: self._parameters_of[name].detach().float().cpu() for name in self._there}

    def compute(self, inputs: Values, *, learns: bool) -> tuple[Tensor, PendingPass]:
        """Have the swarm compute its layers; see `RemoteLayers.forward`."""
        found: tuple[Tensor, PendingPass] = self._run(self._layers.forward(self.weights(), inputs, learns=learns))
        return found

    def turn(self, pending: PendingPass, gradient_BTH: Tensor, *, trains: bool) -> tuple[Tensor, list[Tensor | None]]:
        """Have the swarm compute the gradients of a pass; see `RemoteLayers.backward`. Those of weights are in their order."""
        back_BTH, found = self._run(self._layers.backward(pending, gradient_BTH, trains=trains))
        return back_BTH, [found.get(name) for name in self._there]

    def loss(self, microbatch: TunedMicrobatch) -> tuple[float, list[Tensor | None]]:
        """Have the swarm compute a loss; see `RemoteLayers.loss`. The gradients are in the order of the weights."""
        loss, found = self._run(self._layers.loss(self.weights(), microbatch))
        return loss, [found.get(name) for name in self._there]

    def loss_in_swarm(self, ids_BT: Tensor, labels_BT: Tensor, share: float) -> Tensor:
        """Return the sum of the losses of labels times `share`, with its graph. The swarm has the model's ends."""
        given = [self._parameters_of[name] for name in self._there]
        learns = torch.is_grad_enabled() and any(one.requires_grad for one in given)
        one = TunedMicrobatch(0, (ids_BT.detach().cpu(),), (labels_BT,), share, learns)
        loss: Tensor = _Loss.apply(self, one, *given)  # type: ignore[no-untyped-call]
        return loss


class TunedCausalLM(PreTrainedModel):  # type: ignore[no-untyped-call]
    """A swarm's causal language model with a trainable adapter. Its base model is `model`, a `SwarmBackbone`.

    The adapter's parameters train; the embedding, the final norm and the head do once their `requires_grad` is set. Anything
    else that you put before or behind the model, such as a soft prompt in `inputs_embeds`, is a parameter of yours.
    """

    config_class = PretrainedConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_attention_backend = True

    def __init__(self, run: Run, parts: ModuleParts) -> None:
        """Make the model of `parts`. `run` executes coroutines of the swarm's client. Raises NoRoute, Busy, UsageError."""
        config = copy.deepcopy(parts.family.config)
        config._attn_implementation = "eager"  # no attention runs here
        config._name_or_path = parts.base
        super().__init__(config)
        self.loss_type = "ForCausalLM"  # tells trainers that a row's first label does not count
        self.generation_config = GenerationConfig.from_model_config(config)  # trainers write the padding token there
        self.model = SwarmBackbone(run, parts)
        self._family, self._base = parts.family, parts.base

    def __repr__(self) -> str:
        recipe = self.model.recipe
        return f"<TunedCausalLM {self.config.model_type}, {recipe.method}, {'head here' if self.model.ends else 'loss alone'}>"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and outputs: float32."""
        return torch.float32

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **_unused: Any,
    ) -> CausalLMOutput:
        """Return logits, and if there are `labels` their mean loss, or the sum divided by `num_items_in_batch`.

        Args:
            input_ids: ids_BT (int64).
            attention_mask: (B, T), 0 for padding, which must be on the right. It has no labels.
            inputs_embeds: embedded_BTH, in place of `input_ids`.
            labels: ids_BT, -100 for positions without a label.
            position_ids: (B, T), the place of each token in its document, if rows hold several. Each begins with 0.
            num_items_in_batch: Number of labels of the whole step, if it has several microbatches.

        Returns:
            An output with `loss` and `logits` (B, T, V), float32; without `logits` if the swarm has the head. A soft prompt of the
            adapter has no logits.

        Raises:
            UsageError: The batch is larger than asked for, padded on the left, or not the model's; or too many passes wait for
                `backward`.
            NotFinite: States, weights or the loss are NaN or infinite in the swarm.
            NoRoute, Busy: No machines tune within the client's patience.
        """
        if self.model.ends is None:
            if input_ids is None or labels is None:
                raise UsageError("the ends are in the swarm: give input_ids and labels, or leave out hold_ends=False")
            self.model.check(input_ids, attention_mask)
            labels_BT = _without_padding(labels.detach().cpu(), attention_mask)
            count = int(num_items_in_batch or count_labels(labels_BT, self.model.recipe.prompt_positions))
            return CausalLMOutput(loss=self.model.loss_in_swarm(input_ids, labels_BT, 1 / max(1, count)))
        hidden_BTH = self.model.states(input_ids, attention_mask, inputs_embeds, position_ids)
        logits_BTV = self.model.ends.logits(hidden_BTH).float()
        loss = None
        if labels is not None:
            labels_BT = _without_padding(labels.to(logits_BTV.device), attention_mask)
            labelled = LabelledPositions.of(labels_BT, logits_BTV.shape[1])
            losses = functional.cross_entropy(
                logits_BTV.flatten(0, 1)[labelled.places_N], labelled.labels_N, reduction="sum"
            )
            loss = losses / (num_items_in_batch or max(1, len(labelled)))
        return CausalLMOutput(loss=loss, logits=logits_BTV[:, self.model.recipe.prompt_positions :])

    # -- as a model of transformers

    def get_input_embeddings(self) -> Any:
        """Return the embedding, for `inputs_embeds`. Raises UsageError if it is in the swarm."""
        return self._ends().embedding.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """Return the head's matrix. Raises UsageError if it is in the swarm."""
        return self._ends().output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head's matrix, such as by a linear layer with as many outputs as there are classes."""
        self._ends().set_output_embeddings(new_embeddings)

    def _ends(self) -> HeldEnds:
        if self.model.ends is None:
            raise UsageError("the embedding and the head are in the swarm: leave out hold_ends=False")
        return self.model.ends

    def activation_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Do nothing: activations are at the hops. Trainers call this."""

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Do nothing: activations are at the hops. Trainers call this."""

    def save_pretrained(  # type: ignore[override]  # the other arguments have no use here
        self, save_directory: str | Path, **_unused: Any
    ) -> None:
        """Write the adapter as peft does, and all trained parameters by their names in this module as `model.safetensors`.

        The second file has parameters that you added, too. Raises UsageError if nothing trains, LocalError if the folder cannot be
        written.
        """
        folder = Path(save_directory)
        trained = {name: one for name, one in self.named_parameters() if one.requires_grad}
        if self.model.recipe.method != NO_METHOD:
            tensors = filed(self._family, self.model.recipe, self.model.tensors())
            save_adapter(folder, self.model.recipe, tensors, base=self._base)
        save_parameters(folder, trained)

    def close(self) -> None:
        """Free the adapter at the hops. A later `forward` opens it again."""
        self.model.close()


class _Layers(torch.autograd.Function):
    """The swarm's layers, from the hidden states that enter them and the adapter's weights to the states that leave them."""

    @staticmethod
    def forward(
        ctx: Any, model: SwarmBackbone, places: Values, learns: bool, hidden_BTH: Tensor, *weights: Tensor
    ) -> Tensor:
        outputs_BTH, ctx.pending = model.compute((hidden_BTH.detach().cpu(), *places), learns=learns)
        ctx.model = model
        ctx.save_for_backward(hidden_BTH, *weights)  # autograd refuses the way back once they have changed
        return outputs_BTH.to(hidden_BTH).detach()  # another object, as the graph hangs on it

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient_BTH: Tensor) -> tuple[Tensor | None, ...]:
        _, *weights = ctx.saved_tensors
        trains = any(ctx.needs_input_grad[4:])
        if not bool(gradient_BTH.isfinite().all()):  # as torch does, such as for a scaler of the loss
            return None, None, None, *(torch.full_like(one, torch.nan) for one in (gradient_BTH, *weights))
        back_BTH, found = ctx.model.turn(ctx.pending, gradient_BTH.detach().cpu(), trains=trains)
        gradients = [None if one is None else one.to(like) for one, like in zip(found, weights, strict=True)]
        return None, None, None, back_BTH.to(gradient_BTH), *gradients


class _Loss(torch.autograd.Function):
    """Loss of a microbatch. The gradients come with it, so `backward` only scales them."""

    @staticmethod
    def forward(ctx: Any, model: SwarmBackbone, microbatch: TunedMicrobatch, *weights: Tensor) -> Tensor:
        loss, gradients = model.loss(microbatch)
        ctx.save_for_backward(*(one.to(like) for one, like in zip(gradients, weights, strict=True) if one is not None))
        return torch.tensor(loss, device=weights[0].device)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient * one for one in ctx.saved_tensors)


def _without_padding(labels_BT: Tensor, attention_mask: Tensor | None) -> Tensor:
    if attention_mask is None:
        return labels_BT
    return labels_BT.masked_fill(attention_mask.to(labels_BT.device) == 0, NO_LABEL)
