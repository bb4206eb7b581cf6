"""A small Llama checkpoint, made on the spot: random weights, and a tokenizer of the standard library's most used words.

A later demo trains it on the same source before it serves it.
"""

from __future__ import annotations

import collections
import re
import sysconfig
from pathlib import Path

MODULES = (
    "ast",
    "argparse",
    "asyncio/tasks",
    "collections/__init__",
    "dataclasses",
    "heapq",
    "inspect",
    "json/decoder",
)
VOCABULARY = 1024
LAYERS = 6
HIDDEN = 256


def source_text() -> str:
    """Some of the standard library's own source: text that is always there."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "\n".join((folder / f"{module}.py").read_text(encoding="utf-8", errors="replace") for module in MODULES)


def make_checkpoint(folder: Path, *, seed: int = 0) -> None:
    """Write config, weights and tokenizer of a small Llama into a folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    words = collections.Counter(re.findall(r"\w+|[^\w\s]", source_text()))
    vocabulary = ["<unk>", *(word for word, _ in words.most_common(VOCABULARY - 1))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


def generate_alone(folder: Path, prompt: list[int], max_new_tokens: int) -> list[int]:
    """What one process with the whole model generates: the truth that the swarm is held to."""
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
