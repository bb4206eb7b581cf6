"""Each name of `tokenizer.ggml.pre` splits text in its model's way.

All pieces were compared with token ids of llama.cpp (xllamacpp 2026.10) on 28 texts, with SmolLM2's vocabulary. They differ for six
names: llama.cpp does not end words of kimi-k2, youtu, tiny_aya and cohere2moe before a capital, and looks past a piece's end in
tiny_aya, cohere2moe and afmoe, which the models' own tokenizer.json files do not.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarmnode.client.tokenizer import Tokenizer, stop_ids
from swarmnode.compute.gguf.gguf import GgufCheckpoint
from swarmnode.compute.gguf.gguf_tokenizer import PRE_TOKENIZERS, as_pipeline, pre_tokenizer
from swarmnode.errors import CheckpointError
from tests.compute.model.llama_gguf import WORDS, save_llama_gguf

TEXT = "I'm HERE  1234567 x_y\n\n  déjà, 12 中文！"
PIECES = {
    "I|'|m| HERE| | |123|456|7| x|_|y|\n\n | déjà|,| |12| 中文|！": "default",
    "I|'m| HERE| | 1234567| x|_|y|\n\n | déjà|,| 12| 中文|！": (
        "gpt-2 phi-2 mpt olmo jais exaone4 trillion granite-docling gigachat a.x-4.0 modern-bert jina-es jina-de "
        "jina-v2-es jina-v2-de jina-v1-en jina-v2-code mellum roberta-bpe"
    ),
    "I|'m| HERE|  |1|2|3|4|5|6|7| x|_|y|\n\n | déjà|,| |1|2| 中文|！": (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"
    ),
    "I|'|m| HERE| | |123|456|7| x|_|y|\n\n | déjà|,| 12| 中文|！": "falcon",
    "I|'m| HERE| | |123|456|7| x|_y|\n\n| | déjà|,| |12| 中文|！": (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe glm4 "
        "chatglm-bpe glm5 jais-2 k2-horizon"
    ),
    "I|'m| HERE|  |123|456|7| x|_y|\n\n| | déjà|,| |12| 中文|！": "minicpm5",
    "I|'m| HERE| | |1|2|3|4|5|6|7| x|_y|\n\n| | déjà|,| |1|2| 中文|！": (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 qwen35 laguna ufakzeka "
        "seed-coder bailingmoe bailingmoe2 llada-moe exaone-moe tekken"
    ),
    "I'm| HERE| | |123|456|7| x|_y|\n\n| | déjà|,| |12| 中文|！": "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m",
    "I'm| HERE|  |1|234|567| x|_y|\n\n| | déjà|,| |12| 中文|！": "tiny_aya cohere2moe",
    "I'm| HERE| | |123|456|7| x|_y|\n\n| | déjà|,| |12| |中文|！": "kimi-k2",
    "I'm| HERE| | |1|2|3|4|5|6|7| x|_y|\n\n| | déjà|,| |1|2| |中文|！": "youtu",
    "I|'|m| HERE|  |1234567| x|_|y|\n|\n| | d|é|j|à|,| |12| |中文|！": "deepseek-llm",
    "I|'|m| HERE|  |1|2|3|4|5|6|7| x|_|y|\n|\n| | déjà|,| |1|2| |中文|！": "deepseek-coder",
    "I|'m| HERE|  |123|456|7| x|_y|\n\n| | déjà|,| |12| |中文|！": "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    "I|'m| HERE|  |1|2|3|4|5|6|7| x|_y|\n|\n| | déjà|,| |1|2| |中文|！": "spark2_5",
    "I|'m| HERE|  |1|234|567| x|_y|\n\n| | déjà|,| |12| |中文|！": "afmoe",
    "I'm HERE  |1|234|567| x_y\n\n  déjà, |12| 中文！": "superbpe",
    "I'm| HERE| | 1234567| x_y|\n\n | déjà|,| 12| 中文！": "poro-chat bloom gpt3-finnish",
    "I'm| HERE| | |1|2|3|4|5|6|7| x_y|\n\n | déjà|,| |1|2| 中文！": "viking",
    "I|'|m| HERE|  |1|2|3|4|5|6|7| x|_|y|\n|\n|  |déjà|,| |1|2| 中文|！": "chameleon",
    "I'm HERE  1234567 x_y|\n\n|  déjà, 12 中文！": "gemma4 granite-embed-multi-311m mmbert sarvam-moe",
    "I'm| |HERE|  |1234567| |x_y|\n\n  |déjà,| |12| |中文！": "whitespace",
}


@pytest.mark.parametrize(("pieces", "names"), PIECES.items(), ids=[names.split()[0] for names in PIECES.values()])
def test_pieces(pieces: str, names: str) -> None:
    for name in names.split():
        pipeline = as_pipeline(pre_tokenizer(name)._replace(is_bytes=False))
        assert [piece for piece, _ in pipeline.pre_tokenize_str(TEXT)] == pieces.split("|"), name


def test_every_name_is_here() -> None:
    assert sorted(" ".join(PIECES.values()).split()) == sorted(PRE_TOKENIZERS)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"splits text as 'nonesuch' \(tokenizer\.ggml\.pre\).*tokenizer\.json"):
        pre_tokenizer("nonesuch")


def written(path: Path, **settings: object) -> Tokenizer:
    """The tokenizer that a client makes of a GGUF file with these `settings`."""
    save_llama_gguf(path / "tiny.gguf", **settings)  # type: ignore[arg-type]
    (path / "out").mkdir()
    GgufCheckpoint(path / "tiny.gguf").write(path / "out")
    return Tokenizer(path / "out")


def test_the_file_s_way_reaches_the_client(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, pre="smollm")
    assert [tokenizer.decode([token]) for token in tokenizer.encode("th  1")] == ["th", " ", " ", "1"]
    assert tokenizer.decode(tokenizer.encode("th  1 中")) == "th  1 中"


def test_special_tokens_in_any_letters_are_whole(tmp_path: Path) -> None:
    """DeepSeek's are not spelled in the alphabet of bytes."""
    tokenizer = written(tmp_path, pre="deepseek-llm", words=["<｜end▁of▁sentence｜>"])
    assert tokenizer.encode("th<｜end▁of▁sentence｜>") == [256, len(WORDS)]
    assert stop_ids(tmp_path / "out", tokenizer) == (len(WORDS),)


def test_words_of_the_vocabulary_are_taken_whole_if_the_name_says_so(tmp_path: Path) -> None:
    assert pre_tokenizer("llama-bpe").whole_words and not pre_tokenizer("gpt-2").whole_words
    written(tmp_path, pre="tekken")
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["ignore_merges"]


def test_the_tokens_that_end_a_text(tmp_path: Path) -> None:
    """`eot` and `eom` end it as `eos` does, and so does what the chat template writes behind an answer."""
    words = ["<s>", "<eos>", "<turn-end>", "<eom>", "<|closed|>"]
    first = len(WORDS)

    def say(writer: object) -> None:
        for number, name in enumerate(("bos", "eos", "eot", "eom")):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", first + number)  # type: ignore[attr-defined]
        writer.add_chat_template(  # type: ignore[attr-defined]
            "{% for m in messages %}{{ m.role }}: {{ m.content }}<|closed|>\n{% endfor %}"
        )

    tokenizer = written(tmp_path, words=words, say=say)
    assert tokenizer.ends == (first + 1, first + 4)
    assert stop_ids(tmp_path / "out", tokenizer) == (first + 1, first + 2, first + 3, first + 4)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("tokenizer.ggml.suppress_tokens", [1, 2], "suppress_tokens is not supported"),
        ("tokenizer.ggml.add_sep_token", True, "add_sep_token is not supported"),
        ("tokenizer.rwkv.world", "x", "rwkv"),
        ("general.sampling.mirostat", 2, "mirostat asks for a way to draw"),
        ("llama.logit_scale", 0.25, "logit_scale is 0.25, which is not supported"),
        ("llama.attention.causal", False, "attention.causal is False"),
        ("llama.attention.sliding_window", 64, "sliding_window is 64"),
        ("llama.attention.clamp_kqv", 8.0, "clamp_kqv is 8.0"),
        ("llama.rope.scaling.yarn_log_multiplier", 0.1, "yarn_log_multiplier is 0.1"),
        ("llama.nonesuch", "strange", "llama.nonesuch is strange"),
        ("split.count", 3, "split.count is 3"),
        ("general.type", "adapter", "general.type is adapter"),
    ],
)
def test_a_key_that_is_not_read_is_refused(tmp_path: Path, key: str, value: object, reason: str) -> None:
    def say(writer: object) -> None:
        kind = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}[type(value)]
        if key == "general.type":
            writer.kv_data[0].pop(key, None)  # type: ignore[attr-defined]
        getattr(writer, f"add_{kind}")(key, value)

    with pytest.raises(CheckpointError, match=reason):
        written(tmp_path, say=say)


def test_how_texts_are_drawn_is_kept(tmp_path: Path) -> None:
    def say(writer: object) -> None:
        for name, value in (("temp", 0.5), ("top_p", 0.75), ("penalty_repeat", 1.25)):
            writer.add_float32(f"general.sampling.{name}", value)  # type: ignore[attr-defined]
        writer.add_int32("general.sampling.top_k", 20)  # type: ignore[attr-defined]
        writer.add_bool("llama.attention.causal", True)  # type: ignore[attr-defined]

    written(tmp_path, say=say)
    values = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    drawn = {"temperature": 0.5, "top_p": 0.75, "top_k": 20, "repetition_penalty": 1.25, "do_sample": True}
    assert values == drawn
