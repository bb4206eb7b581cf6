"""Balance loss and z-loss of the routers of a mixture of experts, exact whatever stages the layers are on.

The balance loss is transformers' `load_balancing_loss_func` (Switch Transformers, arXiv 2101.03961, equations 4 to 6): the number
of experts E times the sum over experts of f * p, where f is the mean number of times that a token chooses the expert and p its
mean probability. Both are means over the tokens of all layers, so neither is known before the last layer. The z-loss is the mean
squared log-sum-exp of the routers' logits (ST-MoE, arXiv 2202.08906, equation 5), over the same tokens.

Each layer adds its sums to `sums_R`, a value that crosses every boundary beside the hidden states. The last layer computes the
losses from them. The gradient of the sums is the same at all layers and comes back on the same path.

Letters: E experts, N tokens, R = 2 E + 2 sums: of choices by expert, of probabilities by expert, of squares, and of tokens.

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


class RouterWatch:
    """Sums over the routers of a model's layers, added up by hooks as passes run. Raises UsageError for a family without them."""

    def __init__(self, model: Any) -> None:
        check_routers(type(model))
        recorder, config = type(model)._can_record_outputs["router_logits"], model.config
        self.experts = int(getattr(config, "num_experts", None) or config.num_local_experts)
        self._index, self._top_k = recorder.index, config.num_experts_per_tok
        self._sums_R = self.no_sums()
        self._counts_N: Tensor | None = None
        routers = [module for module in model.modules() if isinstance(module, recorder.target_class)]
        self._hooks = [router.register_forward_hook(self._record) for router in routers]

    def no_sums(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the sums_R before the first layer."""
        return torch.zeros(2 * self.experts + 2, device=device)

    def check(self, sums_R: Tensor) -> None:
        """Raise ProtocolError if sums that came from another stage are not float32, or not as many as the experts demand."""
        if sums_R.dtype != torch.float32 or sums_R.shape != (2 * self.experts + 2,):
            raise ProtocolError(
                f"sums of the routers have the wrong dtype or shape: {sums_R.dtype} {tuple(sums_R.shape)}"
            )

    def begin(self, sums_R: Tensor, counts_BT: Tensor | None) -> None:
        """Begin a pass with the sums of earlier layers. `counts_BT` (bool) excludes padding; None: all tokens count."""
        self._sums_R, self._counts_N = sums_R, None if counts_BT is None else counts_BT.reshape(-1)

    def end(self) -> Tensor:
        """Return the sums_R with those of the pass that `begin` began, and forget them."""
        sums_R, self._sums_R, self._counts_N = self._sums_R, self.no_sums(), None
        return sums_R

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _record(self, _module: Any, _inputs: Any, output: Any) -> None:
        logits_NE = output[self._index] if isinstance(output, tuple) else output
        self._sums_R = self._sums_R + router_sums(logits_NE, self._top_k, self._counts_N)


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


def router_losses(sums_R: Tensor, balance: float, z_loss: float) -> Tensor:
    """Return the balance loss times `balance`, plus the z-loss times `z_loss`, from the sums of all layers."""
    experts = len(sums_R) // 2 - 1
    means_R = sums_R / sums_R[-1].detach().clamp(min=1)
    chosen_E, probabilities_E = means_R[:experts].detach(), means_R[experts : 2 * experts]
    return balance * experts * (chosen_E * probabilities_E).sum() + z_loss * means_R[-2]


def busiest_share(sums_R: Tensor) -> float:
    """Return the load of the busiest expert over the mean load of all: 1 if all are chosen equally often, at most their number; 0
    if there was no token."""
    choices_E = sums_R[: len(sums_R) // 2 - 1].detach()
    total = float(choices_E.sum())
    return float(choices_E.max()) * len(choices_E) / total if total else 0.0
