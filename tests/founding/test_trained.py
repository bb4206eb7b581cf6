"""Trained models are read as their makers meant them: token ids, the end of an answer, and the vector of a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnode.client.tokenizer import Tokenizer, Turn, stop_ids
from swarmnode.compute.model.assemble import check_tensors
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.encoder import EMBED, EMBEDDING, load_encoder, read_pooling

LLAMA_CPP: dict[str, list[int]] = {
    "a  1": [81, 256, 33],
    "x   12345678  9": [104, 333, 33, 34, 35, 36, 37, 38, 39, 40, 256, 41],
    "price: $12,345.67 (50%) -- ok!!!": [
        17517,
        42,
        1885,
        33,
        34,
        28,
        35,
        36,
        37,
        30,
        38,
        39,
        365,
        37,
        32,
        8402,
        3009,
        10907,
        29646,
    ],
    "  def f(x):\n\t\treturn  2*x\n\n\n": [216, 753, 275, 24, 104, 727, 3354, 197, 5406, 256, 34, 26, 104, 16506],
    "naïve café 中文 123 😀": [3546, 46494, 37366, 216, 28589, 29184, 216, 33, 34, 35, 40303, 218],
    "I'm don't WE'LL": [57, 5248, 1326, 982, 26587, 23, 16421],
    "<|im_start|>user\nhi  2<|im_end|>\n": [1, 4093, 198, 6004, 256, 34, 2, 198],
}
"""Token ids of llama.cpp (xllamacpp 2026.10), without a first token."""

SENTENCE = "This is an example sentence"
VECTOR = [0.0676569, 0.0634960, 0.0487131, 0.0793050]
"""The first four of 384 numbers, as sentence-transformers' page of the model has them."""


@pytest.mark.parametrize("text", LLAMA_CPP)
def test_token_ids_are_llama_cpps(smollm2_folder: Path, text: str) -> None:
    tokenizer = Tokenizer(smollm2_folder)
    assert tokenizer.encode(text) == LLAMA_CPP[text]
    assert tokenizer.decode(LLAMA_CPP[text], special_tokens=True) == text


def test_an_answer_ends_at_its_turn(smollm2_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer(smollm2_folder)
    ends = stop_ids(smollm2_folder, tokenizer)
    assert [tokenizer.decode_token(token) for token in ends] == ["<|im_end|>", "<|endoftext|>"]
    check_tensors(Checkpoint(smollm2_folder))
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(smollm2_folder, dtype=torch.float32)
    prompt = tokenizer.encode_chat([Turn("user", "What is the capital of France? Answer in one word.")])
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=list(ends))[
        0
    ].tolist()
    assert ids[-1] == ends[0] and "Paris" in tokenizer.decode(ids[len(prompt) :])


def test_a_sentence_s_vector(minilm: Path) -> None:
    checkpoint = Checkpoint(minilm)
    module, missing = load_encoder(checkpoint, EMBED, read_pooling(checkpoint.small_file))
    with torch.inference_mode():
        vector = module(torch.tensor(Tokenizer(minilm).encode(SENTENCE)))[EMBEDDING]
    assert not missing and vector.shape == (384,)
    torch.testing.assert_close(vector[:4], torch.tensor(VECTOR), atol=1e-5, rtol=0)
