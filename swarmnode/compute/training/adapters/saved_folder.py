"""Folder of a trained adapter as peft saves it, and peft's settings as a recipe.

The folder has `adapter_config.json` and `adapter_model.safetensors`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from swarmnode.compute.model.adapters.adapter_file import PREFIX, adapter_in, lora_config_of, read_fields
from swarmnode.compute.training.adapters.adapter_recipe import ALL_LINEAR, AdapterRecipe
from swarmnode.compute.training.adapters.layers import PROMPT, layer_of
from swarmnode.errors import CheckpointError, LocalError, UsageError
from swarmnode.swarm.storage.own_adapters import CONFIG_NAME, WEIGHTS_NAME

PARAMETERS_NAME = "model.safetensors"
"""File with a module's trained parameters by their names in it, as trainers of transformers look for it"""
UNTRAINED = (
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "exclude_modules",
    "layers_to_transform",
    "lora_dropout",
)
"""Settings of peft that a recipe does not have"""
LORA, PROMPT_TUNING = "LORA", "PROMPT_TUNING"


def recipe_of(fields: Mapping[str, Any], source: str) -> AdapterRecipe:
    """Return the recipe that peft's settings describe: of a config's JSON, or of `LoraConfig.to_dict()`.

    `source` names the settings in errors. Raises UsageError if a setting is not one of a recipe, or out of its bounds.
    """
    kind = fields.get("peft_type")
    if kind == PROMPT_TUNING:
        return AdapterRecipe(method="prompt", prompt_tokens=int(fields.get("num_virtual_tokens") or 0))
    try:
        config = lora_config_of(source, fields)
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    for name in UNTRAINED:
        if fields.get(name):
            raise UsageError(f"{source}: {name} cannot be trained in a swarm; leave it out")
    targets = fields.get("target_modules")
    if not targets or (isinstance(targets, str) and targets != ALL_LINEAR):
        raise UsageError(f"{source}: target_modules must name layers, or be {ALL_LINEAR!r}")
    return AdapterRecipe(
        method="dora" if config.dora else "lora",
        rank=config.rank,
        alpha=config.alpha,
        targets=targets if isinstance(targets, str) else tuple(sorted(targets)),
        rslora=config.stable,
    )


def load_adapter(folder: Path) -> tuple[AdapterRecipe, dict[str, Tensor]]:
    """Return the recipe of a saved adapter, and its weights (float32) by the names of a trainer's tensors.

    An adapter of LoRA-FA is a LoRA adapter. Raises CheckpointError if the folder is damaged, UsageError as `recipe_of`.
    """
    from safetensors.torch import load_file

    fields = read_fields(folder / CONFIG_NAME)
    recipe = recipe_of(fields, str(folder / CONFIG_NAME))
    if recipe.method != "prompt":
        adapter = adapter_in(folder)
        adapter.check_numbers()
        if adapter.base_layers:
            raise UsageError(
                f"{folder} has {min(adapter.base_layers)[:100]}, a layer of the model itself, which is not trained on: save the "
                "adapter with save_embedding_layers=False"
            )
    try:
        found = load_file(folder / WEIGHTS_NAME)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / WEIGHTS_NAME} cannot be read: {error}; save the adapter again") from None
    return recipe, {name.removeprefix(PREFIX).replace(".default", ""): one.float() for name, one in found.items()}


def save_parameters(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a module's trained parameters by their names. Raises UsageError if there are none, LocalError as `save_adapter`."""
    from safetensors.torch import save_file

    if not tensors:
        raise UsageError("no parameter of the module takes a gradient, so nothing was trained")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(held, folder / PARAMETERS_NAME, metadata={"format": "pt"})
    except OSError as error:
        raise LocalError(f"{folder} cannot be written: {error.strerror or error}; choose another folder") from None


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
            "peft_type": PROMPT_TUNING,
            "num_virtual_tokens": tokens,
            "token_dim": width,
            "num_transformer_submodules": 1,
            "prompt_tuning_init": "RANDOM",  # of the start, which the saved prompt replaces
        }
    layers = {layer_of(name.removeprefix(PREFIX)) for name in tensors}
    ends = {layer.rpartition(".")[2] for layer in layers} if recipe.targets == ALL_LINEAR else set(recipe.targets)
    return {
        **common,
        "peft_type": LORA,
        "r": recipe.rank,
        "lora_alpha": recipe.alpha,
        "target_modules": sorted(ends),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": recipe.rslora,
        "use_dora": recipe.method == "dora",
    }
