"""Folder of a trained adapter as peft saves it: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from swarmnode.compute.model.adapters.adapter_file import PREFIX
from swarmnode.compute.training.adapters.layers import layer_of
from swarmnode.compute.training.adapters.recipe import ALL_LINEAR, AdapterRecipe
from swarmnode.compute.training.adapters.starts import PROMPT
from swarmnode.errors import LocalError, UsageError
from swarmnode.swarm.storage.own_adapters import CONFIG_NAME, WEIGHTS_NAME


def save_adapter(folder: Path, recipe: AdapterRecipe, tensors: Mapping[str, Tensor], *, base: str) -> None:
    """Write an adapter that `peft.PeftModel.from_pretrained` and `adapter_in` load. LoRA-FA's is a LoRA adapter.

    Args:
        folder: Folder of the two files, which is created if it is missing.
        recipe: Recipe of the training.
        tensors: The weights of all spans together (`AdapterTrainer.weights`).
        base: Name or path of the base model, for people.

    Raises:
        UsageError: There are no tensors, so that nothing was trained.
        LocalError: The files cannot be written.
    """
    from safetensors.torch import save_file

    if not tensors:
        raise UsageError("the adapter changes no layer of the model; choose other --targets")
    config = json.dumps({**_config(recipe, tensors), "base_model_name_or_path": base}, indent=2, sort_keys=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(held, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        (folder / CONFIG_NAME).write_text(config + "\n")
        (folder / WEIGHTS_NAME).chmod((folder / CONFIG_NAME).stat().st_mode)  # save_file's is its owner's alone
    except OSError as error:
        raise LocalError(f"{folder} cannot be written: {error.strerror or error}; choose another --out") from None


def _config(recipe: AdapterRecipe, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the config's fields that depend on the training."""
    common = {"task_type": "CAUSAL_LM", "inference_mode": True}
    if recipe.method == "prompt":
        tokens, width = tensors[PROMPT].shape
        return {
            **common,
            "peft_type": "PROMPT_TUNING",
            "num_virtual_tokens": tokens,
            "token_dim": width,
            "num_transformer_submodules": 1,
            "prompt_tuning_init": "RANDOM",  # of the start, which the saved prompt replaces
        }
    layers = {layer_of(name.removeprefix(PREFIX)) for name in tensors}
    ends = {layer.rpartition(".")[2] for layer in layers} if recipe.targets == ALL_LINEAR else set(recipe.targets)
    return {
        **common,
        "peft_type": "LORA",
        "r": recipe.rank,
        "lora_alpha": recipe.alpha,
        "target_modules": sorted(ends),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": recipe.rslora,
        "use_dora": recipe.method == "dora",
    }
