"""Splitting of text before a byte-pair tokenizer of a GGUF file merges, by the names of `tokenizer.ggml.pre`.

A name stands for regular expressions that are applied one after the other. Each cuts its matches out of the pieces that the
earlier ones left. They come from the models' own tokenizer.json files; llama.cpp rewrites them where its engine lacks a feature
(`(?i:…)`, `\\p{Lu}`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from swarmnode.errors import CheckpointError

DEFAULT = "default"
"""Name that llama.cpp assumes if a file gives none, as older converters' files"""


class PreTokenizer(NamedTuple):
    """Way to split text into pieces. `splits` are its regular expressions, in their order.

    `whole_words`: a piece that is in the vocabulary becomes one token, whatever the merges are. `adds_bos`: the model wants its
    first token before every text, unless the file says otherwise. `is_bytes`: tokens are spelled in GPT-2's alphabet of bytes;
    else in plain text, with ▁ for a space if `marks_spaces`.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    is_bytes: bool = True
    marks_spaces: bool = False


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer that `tokenizer.ggml.pre` names. Raises CheckpointError if the name is unknown."""
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"its tokenizer splits text as {name[:64]!r} (tokenizer.ggml.pre), which is not supported here: "
            "put the model's tokenizer.json beside the file"
        )
    return PRE_TOKENIZERS[name]


def as_pipeline(pre: PreTokenizer) -> Any:
    """Return the splits as a pre-tokenizer of the `tokenizers` library."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits]
    if pre.is_bytes:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_SPACES}"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _modern(word: str, digits: str, signs: str = _SIGNS + r"[\r\n]*") -> str:
    """Return GPT-4's regular expression, with other words, digits or signs."""
    return rf"{_SHORT_FORMS}|{word}|{digits}|{signs}|{_LINES}"


def _cased(digits: str, short_forms: str = _SHORT_FORMS + "?", besides: str = "") -> str:
    """Return GPT-4o's regular expression: a word ends before a capital. `besides` excludes letters from words."""
    upper, lower, front = f"[{_UPPER}{besides}]", f"[{_LOWER}{besides}]", r"[^\r\n\p{L}\p{N}]?"
    words = rf"{front}{upper}*{lower}+{short_forms}|{front}{upper}+{lower}*{short_forms}"
    return rf"{words}|{digits}|{_SIGNS}[\r\n/]*|{_LINES}"


_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|{_SPACES}"
_LLAMA3 = _modern(_WORD, r"\p{N}{1,3}")
_QWEN2 = _modern(_WORD, r"\p{N}")
_PUNCTUATED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
)
_DEEPSEEK3 = rf"{_PUNCTUATED}[\r\n]*|{_LINES}"
_KANJI_AND_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
_KANJI_AND_HANGUL = "[一-龥ࠀ-一가-\ud7ff]+"
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
_THOUSANDS = r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))"  # from the right, as 1 234 567
_NO_HAN = r"&&[^\p{Han}]"
# The cased letters that DeepSeek's first tokenizer knew.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴ"
    "ᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_ASIAN = (
    "[一-鿿㐀-䶿\u8c48-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdf\u0e40-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    DEFAULT: PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "granite-docling", "gigachat", "a.x-4.0"),
            *("modern-bert", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code", "mellum"),
            "roberta-bpe",
        ),
        PreTokenizer((_GPT2,)),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe", "glm5"), PreTokenizer((_LLAMA3,))),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _modern(_WORD, r"\p{N}+")), whole_words=True),
    "jais-2": PreTokenizer(
        (
            rf"{_SHORT_FORMS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|\s*[\r\n]+|"
            + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
            + r"|\s",
        )
    ),
    "k2-horizon": PreTokenizer((_modern(r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}\x{200C}\x{200D}]+", r"\p{N}{1,3}"),)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        PreTokenizer((_QWEN2,)),
    ),
    "qwen35": PreTokenizer((_modern(r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)),
    "laguna": PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|{_LINES}",)),
    "seed-coder": PreTokenizer((_modern(_WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        PreTokenizer((rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|\s*[\r\n]|{_SPACES}",)),
    ),
    "exaone-moe": PreTokenizer(
        (
            rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_SIGNS}[\r\n/]?"
            rf"|\s*[\r\n]|{_SPACES}",
        )
    ),
    "tekken": PreTokenizer((_cased(r"\p{N}", short_forms=""),), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), PreTokenizer((_cased(r"\p{N}{1,3}"),))),
    "granite-embed-multi-97m": PreTokenizer((_cased(r"\p{N}{1,3}"),), whole_words=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _cased(r"\p{N}{1,3}")))),
    "kimi-k2": PreTokenizer((r"\p{Han}+|" + _cased(r"\p{N}{1,3}", besides=_NO_HAN).replace(r"[\r\n/]*", r"[\r\n]*"),)),
    "youtu": PreTokenizer(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _KANJI_AND_KANA,
            _cased(r"\p{N}"),
        ),
        whole_words=True,
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            _KANJI_AND_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _KANJI_AND_HANGUL, r"\p{N}")),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
        PreTokenizer((r"\p{N}{1,3}", _KANJI_AND_KANA, _DEEPSEEK3)),
    ),
    "spark2_5": PreTokenizer((r"\p{N}{1,3}", _KANJI_AND_KANA, rf"{_PUNCTUATED}|[\r\n]|{_SPACES}", r"\p{N}")),
    "afmoe": PreTokenizer((_THOUSANDS, _ASIAN, _DEEPSEEK3)),
    "superbpe": PreTokenizer((r"\p{N}+", _THOUSANDS)),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            "[\\t\\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ),
    **dict.fromkeys(
        ("gemma4", "granite-embed-multi-311m", "mmbert", "sarvam-moe"),
        PreTokenizer((r"[^\n]+|\n+",), is_bytes=False, marks_spaces=True),
    ),
    "whitespace": PreTokenizer((r"\S+",), is_bytes=False),
}
