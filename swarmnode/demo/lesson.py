"""The demo's lesson: a small byte-level Llama with random weights, and the Zen of Python, which every Python contains, as
its text."""

from __future__ import annotations

import codecs
import contextlib
import importlib
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnode.swarm.records.run import Run
    from swarmnode.swarm.storage.swarmfile import Swarm

BYTES = 256
LAYERS, HIDDEN, SEQUENCE = 2, 128, 128
COPIES = 256  # one after another, so that samples begin anywhere in the poem
PROMPT = "Beautiful is better"
TOKENS = 76  # three lines
STEPS = 130
BATCH, MICROBATCH = 16, 4
TOKENS_A_STEP = BATCH * SEQUENCE
LEARNING_RATE = 4e-3  # at twice the rate the text is not learnt in this many steps, at half the rate less of it is
WARMUP_STEPS = 10
IMPORTED = (
    "swarmnode.founding.model_source",
    "swarmnode.client.training.client",
    "swarmnode.compute.capacity.memory",
    "transformers.models.llama.modeling_llama",
)


def poem() -> str:
    """Return the Zen of Python, by Tim Peters (PEP 20)."""
    with contextlib.redirect_stdout(io.StringIO()):  # the module prints the poem when it is imported
        import this
    return codecs.decode(this.s, "rot13") + "\n"


def original() -> str:
    """Return the text that the swarm recites if it has learnt all of it."""
    text = poem()
    start = text.index(PROMPT)
    return text[start : start + len(PROMPT) + TOKENS]


def write_text(path: Path) -> int:
    """Write the lesson's text, COPIES copies of the poem, to `path`. Returns the bytes of one copy."""
    text = poem().encode()
    path.write_bytes(text * COPIES)
    return len(text)


def write_config(folder: Path, layers: int = LAYERS) -> None:
    """Write the transformers config of the model that learns the poem, with `layers` layers, into `folder`."""
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
    """Write a checkpoint of the lesson's model with `layers` layers and random weights into `folder`."""
    from swarmnode.compute.model.fresh import write_fresh_model

    write_config(folder, layers)
    write_fresh_model(folder, folder, 0)


def import_all() -> None:
    """Import the modules for founding, training, measuring a model and generating with transformers."""
    for module in IMPORTED:
        importlib.import_module(module)


def found(file: Path) -> Swarm:
    """Found a swarm that trains the lesson's model from random weights. Its .swarm file is `file`; the config and weights
    lie beside it."""
    from swarmnode.founding.bootstraps import Bootstraps
    from swarmnode.founding.model_source import from_config
    from swarmnode.founding.swarm_creation import create_swarm
    from swarmnode.swarm.records.manifest import TRAIN
    from swarmnode.swarm.storage.swarmfile import save_swarm

    write_config(file.with_name("config"))
    source = from_config(file.with_name("config"), file.with_name("weights"))
    swarm = create_swarm(file.stem, source, Bootstraps(), mode=TRAIN)
    save_swarm(swarm, file)
    return swarm


def memory_for_half(swarm: Swarm) -> int:
    """Return the bytes of memory to lend for about half of the model's units, so that two stages with two replicas each form."""
    from swarmnode.compute.capacity.memory import limit_bytes_for, training_sizes
    from swarmnode.compute.model.checkpoint import Checkpoint

    assert swarm.checkpoint is not None
    sizes = training_sizes(Checkpoint(swarm.checkpoint))
    half = len(sizes.weight_bytes) // 2
    return limit_bytes_for(max(sizes.need_bytes(start, start + half, 0) for start in range(half + 1)))


def recipe(steps: int) -> Run:
    """Return the training run of the lesson, with `steps` steps."""
    from swarmnode.client.training.preparation import NO_DATA
    from swarmnode.swarm.records.run import Run

    return Run(
        data=NO_DATA,
        steps=steps,
        batch=BATCH,
        microbatch=MICROBATCH,
        sequence=SEQUENCE,
        learning_rate=LEARNING_RATE,
        warmup_steps=WARMUP_STEPS,
        checkpoint_steps=max(10, steps // 4),
    )


def generate_alone(folder: Path, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Generate greedily with transformers and the whole checkpoint in this process: the reference for the swarm's text."""
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
