"""What the demo teaches: a small byte-level Llama, fresh, and as its text a poem that every Python carries along."""

from __future__ import annotations

import codecs
import contextlib
import importlib
import io
import json
from pathlib import Path

BYTES = 256
LAYERS, HIDDEN, SEQUENCE = 2, 128, 128
MODEL_CODE = "transformers.models.llama.modeling_llama"
COPIES = 256  # one after another, so that samples begin anywhere in the poem


def poem() -> str:
    """The Zen of Python, by Tim Peters (PEP 20)."""
    with contextlib.redirect_stdout(io.StringIO()):  # it recites itself when it is imported
        import this
    return codecs.decode(this.s, "rot13") + "\n"


def write_text(path: Path) -> int:
    """Write the text of the lesson into a file; the bytes of one copy."""
    text = poem().encode()
    path.write_bytes(text * COPIES)
    return len(text)


def write_config(folder: Path, layers: int = LAYERS) -> None:
    """Write the transformers config of the model that learns it."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": BYTES,
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4 * SEQUENCE,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(values))


def write_untaught(folder: Path, layers: int) -> None:
    """Write a whole checkpoint of such a model, of so many layers, as it is before it has learnt anything."""
    from swarmnode.compute.model.fresh import write_fresh_model

    write_config(folder, layers)
    write_fresh_model(folder, folder, 0)


def import_all() -> None:
    """Import what measuring a model and generating alone take: seconds, for which nobody need wait if they pass meanwhile."""
    for module in ("swarmnode.compute.memory", "swarmnode.compute.model.checkpoint", MODEL_CODE):
        importlib.import_module(module)


def generate_alone(folder: Path, prompt: list[int], max_new_tokens: int) -> list[int]:
    """What one process with the whole model of a checkpoint generates: the truth that the swarm is held to."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
        )
    return list(output[0, len(prompt) :].tolist())
