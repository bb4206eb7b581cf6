"""A small random Llama that speaks: with a tokenizer of all of its ids, and a chat template."""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.llama import save_llama

VOCABULARY = 512
SPECIALS = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>")
LETTERS = "etaoinshrdlucmfw"  # whose pairs are tokens, too
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}"
    "{% if message.role not in ('user', 'assistant', 'system', 'tool') %}"
    "{{ raise_exception('who is ' + message.role + '?') }}"
    "{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_speaking_llama(folder: Path, *, chat_template: str | None = TEMPLATE, layers: int = 2, **sizes: int) -> None:
    """Write the checkpoint. It has no end token that it would ever say by itself, so texts are as long as they are asked to be;
    `sizes` are fields of transformers' LlamaConfig."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save_llama(folder, layers=layers, vocab_size=VOCABULARY, **sizes)
    names = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = list(itertools.product(LETTERS, repeat=2))[: VOCABULARY - len(names)]
    ids = {name: number for number, name in enumerate([*names, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(ids, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    whole.chat_template = chat_template
    whole.save_pretrained(folder)


def never_ends(folder: Path) -> None:
    """Change the checkpoint so that it draws none of SPECIALS, its end token among them, at the page's temperature: their logits
    are 0, and those of the others far apart."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    head_VH = weights["lm_head.weight"] * 100
    head_VH[: len(SPECIALS)] = 0
    save_file({**weights, "lm_head.weight": head_VH}, folder / "model.safetensors", {"format": "pt"})
