"""SentencePiece vocabularies of GGUF files cut texts as transformers' own conversion does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from swarmnode.compute.gguf.gguf_reader import GgufReader
from swarmnode.compute.gguf.gguf_tokenizer import GgufTokenizer
from tests.compute.model.llama_gguf import save_llama_gguf

SPACE = "▁"
LETTERS = "abcdefgé中1!'.\n"
MARKS = ["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<mask>"]  # all that a tokenizer of transformers would add
ENDS = ["<think>", "<|im_end|>", "<start_of_turn>"]


def vocabulary(draw: random.Random, *, plain_spaces: bool) -> tuple[list[str], list[int]]:
    """Tokens and their kinds: marks, bytes, words that merge in a drawn order, and letters."""
    words = [SPACE, *LETTERS]
    while len(words) < 60:
        word = draw.choice(words) + draw.choice(words)
        if word not in words and len(word) < 9:
            words.append(word)
    runs = [run for run in (SPACE * 2, SPACE * 3) if run not in words]
    words += [" " * len(run) for run in runs] if plain_spaces else runs
    draw.shuffle(words)
    tokens = [*MARKS, *(f"<0x{byte:02X}>" for byte in range(256)), *words, *ENDS]
    kinds = [2, *[3] * (len(MARKS) - 1), *[6] * 256, *[1] * len(words), *(draw.choice([3, 4]) for _ in ENDS)]
    return tokens, kinds


@pytest.mark.parametrize("number", range(18))
def test_ids_and_texts_are_transformers_own(tmp_path: Path, number: int) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    draw = random.Random(number)
    architecture = ("llama", "gemma2", "gemma3", "phi3", "qwen2", "llama")[number % 6]
    tokens, kinds = vocabulary(draw, plain_spaces=architecture.startswith("gemma") and number % 4 > 0)
    scores = [draw.choice([-place, -draw.randint(0, 9), 0]) / 1.0 for place in range(len(tokens))]
    prefix = (None, True, False)[number // 6] if architecture == "llama" else None

    def say(writer: Any) -> None:
        for name in ("merges", "model", "pre", "tokens", "token_type"):
            del writer.kv_data[0][f"tokenizer.ggml.{name}"]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_scores(scores)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if prefix is not None:
            writer.add_add_space_prefix(prefix)

    save_llama_gguf(tmp_path / "a.gguf", architecture=architecture, say=say)
    GgufTokenizer(GgufReader(tmp_path / "a.gguf").fields).write(tmp_path)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.json").unlink()  # else transformers reads it
    auto: Any = AutoTokenizer
    reference = auto.from_pretrained(str(tmp_path), gguf_file="a.gguf").backend_tokenizer
    assert ours.get_vocab_size() == len(tokens)
    for _ in range(100):
        text = "".join(draw.choices(f"{LETTERS}  ☃", k=draw.randint(1, 40))) + draw.choice(["", *ENDS])
        ids = ours.encode(text, add_special_tokens=False).ids
        if prefix is not False:  # transformers' conversion always puts the space in front
            assert ids == reference.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids).strip(" ") == reference.decode(ids).strip(" ") or prefix is False
