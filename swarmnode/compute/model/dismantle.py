"""Taking a model apart: its memory is free at once, whoever still refers to it.

Modules, hooks and doors of a model refer to one another in circles, which a collector would have to find. Until then a node that
moves would hold two spans.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn


def dismantle(model: nn.Module, device: torch.device) -> None:
    """Drop all weights and buffers, packed ones too, and give what the device's allocator keeps of them back. It cannot be used
    any more."""
    for module in list(model.modules()):
        for held in (module._parameters, module._buffers, module._modules):
            held.clear()
        module.__dict__.pop("_packed", None)
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # of a card that is lost, with all that was on it
            torch.cuda.empty_cache()
