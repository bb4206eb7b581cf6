"""Small random Llamas on disk."""

from __future__ import annotations

from pathlib import Path


def save_llama(folder: Path, layers: int, **sizes: int) -> None:
    """Write a checkpoint, the same every time, of `layers` + 2 units; `sizes` are fields of transformers' LlamaConfig."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1 << 17,  # more than any node here has memory for
        **sizes,
    }
    config = LlamaConfig(
        num_hidden_layers=layers, bos_token_id=None, eos_token_id=None, pad_token_id=None, **fields
    )  # without an end token texts are as long as they are asked to be
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)
