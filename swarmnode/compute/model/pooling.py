"""How the vectors of a text's tokens become the text's: as the files of sentence-transformers beside a checkpoint say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmnode.errors import CheckpointError

MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
LENGTH_FILE = "sentence_bert_config.json"
CLS, MEAN, MAX, LAST = "cls_token", "mean_tokens", "max_tokens", "lasttoken"
MODES = (CLS, MEAN, MAX, LAST)

SmallFile = Callable[[str], Path | None]
"""A small file of a checkpoint by its name; None where there is none"""


@dataclass(frozen=True)
class Pooling:
    """`mode` by its name in sentence-transformers; `normalize`: to length 1. `positions` are all that it was made for, if fewer
    than the model has. Where a checkpoint says nothing: the mean, of length 1."""

    mode: str = MEAN
    normalize: bool = True
    positions: int | None = None

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        """The vector pooled_H of a text."""
        pooled_H = {
            CLS: lambda: hidden_TH[0],
            MEAN: lambda: hidden_TH.mean(0),
            MAX: lambda: hidden_TH.amax(0),
            LAST: lambda: hidden_TH[-1],
        }[self.mode]()
        return torch.nn.functional.normalize(pooled_H, dim=0) if self.normalize else pooled_H


def read_pooling(file: SmallFile) -> Pooling:
    """As the checkpoint says. Raises CheckpointError where it wants what a graph would not compute so."""
    modules = _read(file, MODULES_FILE, list)
    if modules is None:
        return Pooling()
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
    others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if others or kinds[:2] != ["Transformer", "Pooling"]:
        raise CheckpointError(f"{MODULES_FILE} asks for {', '.join(others or kinds)}, which is not supported")
    settings = _read(file, POOLING_FILE, dict) or {}
    modes = [mode for mode in settings if mode.startswith("pooling_mode_") and settings[mode] is True]
    mode = modes[0].removeprefix("pooling_mode_") if modes else str(settings.get("pooling_mode", MEAN))
    if len(modes) > 1 or mode not in MODES:
        names = ", ".join(mode.removeprefix("pooling_mode_") for mode in modes) or mode
        raise CheckpointError(f"{POOLING_FILE} asks for {names}; supported is one of {', '.join(MODES)}")
    positions = (_read(file, LENGTH_FILE, dict) or {}).get("max_seq_length")
    return Pooling(mode, "Normalize" in kinds, positions if isinstance(positions, int) else None)


def _read(file: SmallFile, name: str, kind: type) -> Any:
    path = file(name)
    if path is None:
        return None
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, kind):
        raise CheckpointError(f"{path} is not what sentence-transformers writes")
    return content
