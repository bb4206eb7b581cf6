"""Loss of the next token."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from swarmnode.data.rows import NO_LABEL


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
