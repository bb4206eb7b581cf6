"""Small LoRA adapters on disk, as peft writes them, and the models that they make of others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

RANK, ALPHA = 4, 8


def matrices(
    model: nn.Module, chosen: Callable[[str], bool], *, rank: int = RANK, seed: int = 0, strength: float = 0.3
) -> dict[str, Tensor]:
    """Random A and B of the chosen linear layers of a whole model, by peft's names; no row is zero."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not chosen(name) or not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
            continue
        outputs, inputs = weight.shape if isinstance(module, nn.Linear) else (weight.shape[1], weight.shape[0])
        key = f"base_model.model.{name}"
        found[f"{key}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * strength
        found[f"{key}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * strength
    assert found
    return found


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **fields: Any) -> Path:
    """An adapter's two files; `fields` are of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["named"],
        "bias": "none",
        **fields,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


@torch.no_grad()
def merge(model: nn.Module, tensors: Mapping[str, Tensor], *, alpha: float = ALPHA, rslora: bool = False) -> nn.Module:
    """The whole model with an adapter's changes in its own weights: what the adapter means. Magnitudes are DoRA's."""
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        rank = len(tensors[name])
        change_OI = (
            alpha / (math.sqrt(rank) if rslora else rank) * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        )
        layer = model.get_submodule(module)
        weight: Any = layer.weight
        weight += change_OI if isinstance(layer, nn.Linear) else change_OI.t()
        magnitude = tensors.get(name.replace("lora_A.weight", "lora_magnitude_vector"))
        if magnitude is not None:
            rows = weight if isinstance(layer, nn.Linear) else weight.t()
            rows *= (magnitude / rows.norm(dim=1))[:, None]
    return model


def with_magnitudes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An adapter of DoRA: `tensors` with magnitudes that are not the matrices' own."""
    found = dict(tensors)
    for name in tensors:
        if name.endswith("lora_B.weight"):
            outputs = len(tensors[name])
            found[name.replace("lora_B.weight", "lora_magnitude_vector")] = torch.linspace(0.5, 2, outputs)
    return found


def save_llama_adapter(folder: Path, model_folder: Path, *, seed: int = 0, layers: str = "") -> Path:
    """Of a checkpoint's attention and MLP, in all layers or in those whose names have `layers` in them; strong enough to change
    what is drawn."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    return write_adapter(folder, matrices(model, lambda name: "_proj" in name and layers in name, seed=seed))


def merged_checkpoint(folder: Path, model_folder: Path, adapter: Path) -> Path:
    """The checkpoint that an adapter makes of another."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    merge(model, load_file(adapter / "adapter_model.safetensors")).save_pretrained(folder)
    return folder
