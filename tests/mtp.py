"""Tiny checkpoints with a prediction layer (MTP), in the form of DeepSeek-V3 and GLM-4.5, and EAGLE heads beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.numerics.families import tiny_config

LAYERS = 2
WEIGHTS = "model.safetensors"


def save_mtp(folder: Path, model_type: str, *, knows: bool = False) -> Path:
    """Save a model with a prediction layer. If `knows`, each token has one that follows, and the layer knows it; else all weights
    are random."""
    torch.manual_seed(7)
    config = tiny_config(model_type)
    config.num_hidden_layers, config.num_mtp_layers = LAYERS, 1
    config.first_k_dense_replace = 1
    main = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    one = config.get_mtp_config()
    layer = AutoModelForCausalLM.from_config(one, dtype=torch.float32)
    for module in (main, layer):
        for name, parameter in module.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    width = config.hidden_size
    projection = torch.randn(width, 2 * width) * width**-0.5
    if knows:
        _teach(main, layer)
        projection = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)
    main.save_pretrained(folder)
    layer.save_pretrained(folder / "layer")
    prefix = f"model.layers.{LAYERS}."
    ends = {"model.norm.": f"{prefix}shared_head.norm.", "lm_head.": f"{prefix}shared_head.head."}
    ends |= {"model.embed_tokens.": f"{prefix}embed_tokens.", "model.layers.0.": prefix}
    stored = {
        new + name.removeprefix(old): tensor
        for name, tensor in load_file(folder / "layer" / WEIGHTS).items()
        for old, new in ends.items()
        if name.startswith(old)
    }
    norms = {f"{prefix}{name}.weight": torch.rand(width) + 0.5 for name in ("enorm", "hnorm")}
    stored |= {f"{prefix}eh_proj.weight": projection, **norms}
    stored[f"{prefix}shared_head.head.weight"] = main.lm_head.weight.detach().clone()
    stored[f"{prefix}embed_tokens.weight"] = main.model.embed_tokens.weight.detach().clone()
    save_file({**load_file(folder / WEIGHTS), **stored}, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def save_eagle(folder: Path, main: Path, *, knows: bool = False, embeds: bool = True) -> Path:
    """Save an EAGLE head for the model in `main`. If `knows`, it leaves each token's embedding to the model's head, which knows the
    token that follows; else its weights are random. Without `embeds` it borrows the model's embedding."""
    torch.manual_seed(8)
    stored = load_file(main / WEIGHTS)
    embedding, config = stored["model.embed_tokens.weight"], tiny_config("llama")
    config.vocab_size, width = embedding.shape
    config.hidden_size, config.num_hidden_layers = width, 1
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    prefix = "model.layers.0."
    layer = {name: tensor for name, tensor in load_file(folder / WEIGHTS).items() if name.startswith(prefix)}
    for name, tensor in layer.items():
        if "norm" in name:
            tensor.uniform_(0.5, 1.5)
        elif not knows:
            tensor.normal_(std=2 * tensor.shape[1] ** -0.5)  # large enough for each part to change guesses
        elif "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    fusion = torch.eye(width, 2 * width) if knows else torch.randn(width, 2 * width) * 2 * width**-0.5
    head = {
        f"layers.0.{name.removeprefix(prefix)}": tensor
        for name, tensor in layer.items()
        if "input_layernorm" not in name
    }
    head |= {"fc.weight": fusion, "fc.bias": torch.zeros(width) if knows else torch.randn(width) * 0.1}
    save_file(head | ({"embed_tokens.weight": embedding.clone()} if embeds else {}), folder / WEIGHTS)
    return folder


def _teach(main: Any, layer: Any) -> None:
    """Let layers change nothing, and the head name the token that follows each token."""
    with torch.no_grad():
        for module in (main, layer):
            for name, parameter in module.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    parameter.zero_()
                elif "norm" in name:
                    parameter.fill_(1.0)
        embedding = torch.nn.functional.normalize(torch.randn_like(main.model.embed_tokens.weight), dim=1)
        main.model.embed_tokens.weight.copy_(embedding)
        main.lm_head.weight.copy_(embedding.roll(1, dims=0))  # behind token t follows t + 1
