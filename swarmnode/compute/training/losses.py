"""Balance loss and z-loss of the routers of a mixture of experts, exact whatever stages the layers are on.

The balance loss of tokens is the number of experts E times the sum over experts of f * p, where f is the mean number of times that
a token chooses the expert and p its mean probability (Switch Transformers, arXiv 2101.03961, equations 4 to 6). It is taken of each
layer's tokens, and the mean over layers counts. Runs of earlier versions take it of the tokens of all layers at once, as
transformers' `load_balancing_loss_func` does: that is small, too, if each layer has other favourites. The z-loss is the mean
squared log-sum-exp of the routers' logits (ST-MoE, arXiv 2202.08906, equation 5), over the tokens of all layers.

Each layer adds to a vector that crosses every boundary beside the hidden states, and the last layer computes the losses from it.
The gradient of the vector is the same at all layers and comes back on the same path. The vector holds TERMS numbers: the sums over
layers of their balance losses and z-losses, the number of layers, and the largest load of an expert. In runs of earlier versions it
holds R = 2 E + 2 sums over the layers' tokens: of choices by expert, of probabilities by expert, of squares, and of tokens.

Letters: E experts, N tokens, R sums, S numbers of the vector.

Loss of the next token.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from swarmnode.data.rows import NO_LABEL
from swarmnode.errors import ProtocolError, UsageError
from swarmnode.swarm.records.run import Recipe


def next_token_loss(logits_BTV: Tensor, labels_BT: Tensor, *, smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of each next token that has a label, in float32; 0 if none has.

    `smoothing` gives that share of each label to the whole vocabulary. `z_loss` times the mean squared log-sum-exp of the logits is
    added (PaLM, arXiv 2204.02311).

    A label excludes the last position, which avoids a copy of the logits.
    """
    next_N = functional.pad(labels_BT[:, 1:], (0, 1), value=NO_LABEL).flatten()
    logits_NV = logits_BTV.float().flatten(0, 1)
    next_N = next_N.to(logits_NV.device, non_blocking=logits_NV.device.type == "cuda")
    has_label_N = next_N != NO_LABEL
    count = has_label_N.sum().clamp(min=1)  # a mean over no labels would be NaN
    loss = functional.cross_entropy(
        logits_NV, next_N, ignore_index=NO_LABEL, label_smoothing=smoothing, reduction="sum"
    )
    if z_loss:
        loss = loss + z_loss * logits_NV.logsumexp(1).square().masked_fill(~has_label_N, 0.0).sum()
    return loss / count


TRANSFORMERS_ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")
"""Arguments of the balance loss that this module computes; families with another loss have others"""


def check_routers(model_class: type[Any]) -> None:
    """Raise UsageError if a family has no routers, or transformers has another balance loss for them."""
    loss = getattr(sys.modules[model_class.__module__], "load_balancing_loss_func", None)
    known = loss is not None and tuple(inspect.signature(loss).parameters) == TRANSFORMERS_ARGUMENTS
    if not known or "router_logits" not in (getattr(model_class, "_can_record_outputs", None) or {}):
        raise UsageError(
            "--router-balance and --router-z-loss are for mixtures of experts whose routers transformers knows how to balance "
            f"(such as Qwen3-MoE and Mixtral), not for {model_class.__name__}: leave them out"
        )


TERMS = 4
"""Numbers of the vector that crosses boundaries if each layer is balanced by itself"""


class RouterWatch:
    """Sums over the routers of a model's layers, added up by hooks as passes run, for the losses of `recipe`.

    Raises UsageError for a family without routers.
    """

    def __init__(self, model: Any, recipe: Recipe) -> None:
        check_routers(type(model))
        recorder, config = type(model)._can_record_outputs["router_logits"], model.config
        experts = int(getattr(config, "num_experts", None) or config.num_local_experts)
        self._recipe, self._by_layer = recipe, recipe.balance_by_layer is True
        self._size = TERMS if self._by_layer else 2 * experts + 2
        self._index, self._top_k = recorder.index, config.num_experts_per_tok
        self._sums_S = self.no_sums()
        self._counts_N: Tensor | None = None
        routers = [module for module in model.modules() if isinstance(module, recorder.target_class)]
        self._hooks = [router.register_forward_hook(self._record) for router in routers]

    def no_sums(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the vector before the first layer."""
        return torch.zeros(self._size, device=device)

    def check(self, sums_S: Tensor) -> None:
        """Raise ProtocolError if a vector that came from another stage is not float32, or not as long as the run demands."""
        if sums_S.dtype != torch.float32 or sums_S.shape != (self._size,):
            raise ProtocolError(
                f"sums of the routers have the wrong dtype or shape: {sums_S.dtype} {tuple(sums_S.shape)}"
            )

    def begin(self, sums_S: Tensor, counts_BT: Tensor | None) -> None:
        """Begin a pass with the vector of earlier layers. `counts_BT` (bool) excludes padding; None: all tokens count."""
        self._sums_S, self._counts_N = sums_S, None if counts_BT is None else counts_BT.reshape(-1)

    def end(self) -> Tensor:
        """Return the vector with the layers of the pass that `begin` began, and forget it."""
        sums_S, self._sums_S, self._counts_N = self._sums_S, self.no_sums(), None
        return sums_S

    def judge(self, sums_S: Tensor) -> tuple[Tensor, float]:
        """Return the routers' loss by the vector of all layers, and the load of the busiest expert over the mean load.

        The load is that of the worst layer, or of all layers together in runs of earlier versions; 0 if there was no token.
        """
        if self._by_layer:
            balance, z_loss, layers, load = sums_S
            layers = layers.detach().clamp(min=1)
            balance, z_loss = balance / layers, z_loss / layers
        else:
            (balance, z_loss), load = router_losses(sums_S), busiest_share(sums_S)
        return self._recipe.router_balance * balance + self._recipe.router_z_loss * z_loss, float(load.detach())

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _record(self, _module: Any, _inputs: Any, output: Any) -> None:
        logits_NE = output[self._index] if isinstance(output, tuple) else output
        own_R = router_sums(logits_NE, self._top_k, self._counts_N)
        if self._by_layer:
            added = self._sums_S[:-1] + torch.stack([*router_losses(own_R), own_R.new_ones(())])
            self._sums_S = torch.cat([added, torch.maximum(self._sums_S[-1:], busiest_share(own_R)[None])])
        else:
            self._sums_S = self._sums_S + own_R


def router_sums(logits_NE: Tensor, top_k: int, counts_N: Tensor | None = None) -> Tensor:
    """Return the float32 sums_R of one router's logits. A token chooses the `top_k` experts with the largest logits."""
    logits_NE = logits_NE.float()
    weights_N = logits_NE.new_ones(len(logits_NE)) if counts_N is None else counts_N.to(logits_NE)
    probabilities_NE = functional.softmax(logits_NE, -1)
    chosen_NK = probabilities_NE.detach().topk(top_k, -1).indices
    choices_E = logits_NE.new_zeros(logits_NE.shape[1])
    choices_E.scatter_add_(0, chosen_NK.flatten(), weights_N.repeat_interleave(top_k))
    squares = (logits_NE.logsumexp(-1).square() * weights_N).sum()
    tail = torch.stack([squares, weights_N.sum()])
    return torch.cat([choices_E, (probabilities_NE * weights_N[:, None]).sum(0), tail])


def router_losses(sums_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the balance loss and the z-loss of the tokens in sums_R; 0 if there was no token."""
    experts = len(sums_R) // 2 - 1
    means_R = sums_R / sums_R[-1].detach().clamp(min=1)
    chosen_E, probabilities_E = means_R[:experts].detach(), means_R[experts : 2 * experts]
    return experts * (chosen_E * probabilities_E).sum(), means_R[-2]


def busiest_share(sums_R: Tensor) -> Tensor:
    """Return the load of the busiest expert over the mean load: 1 if all are chosen equally often, at most their number.

    It is 0 if there was no token.
    """
    choices_E = sums_R[: len(sums_R) // 2 - 1].detach()
    return choices_E.max() * len(choices_E) / choices_E.sum().clamp(min=1)
