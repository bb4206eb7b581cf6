r"""The tokenizer within a GGUF file: its conversion into files for transformers, and the tokens that end a text.

Vocabularies are built here. transformers splits most byte-pair vocabularies in GPT-2's way, and drops special tokens that are not
spelled in its alphabet of bytes (DeepSeek's). It builds a SentencePiece vocabulary right, but reads the header three times more and
adds special tokens of the tokenizer's class that the model does not have.

Splitting of text before a byte-pair tokenizer of a GGUF file merges, by the names of `tokenizer.ggml.pre`.

A name stands for regular expressions that are applied one after the other. Each cuts its matches out of the pieces that the
earlier ones left. They come from the models' own tokenizer.json files; llama.cpp rewrites them where its engine lacks a feature
(`(?i:…)`, `\p{Lu}`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence, Sized
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from swarmnode.compute.packing.tensor_entry import MAX_TOLD_CHARS
from swarmnode.errors import CheckpointError, LocalError

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


stages = logging.getLogger("swarmnode.stages")

Merges = Sequence[tuple[str, str]]
TOKENIZER_NAME, NO_MERGES = "tokenizer.json", '"merges": []'

PREFIX = "tokenizer."
TOKENS = "tokenizer.ggml.tokens"
SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # of `tokenizer.ggml.token_type`

NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
END_TEXTS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "</s>"}
    | {"<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>"}
    | {"<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["}
)
"""Control tokens that end a text in any vocabulary, from llama.cpp's list. `NO_ENDS` holds exceptions."""
NO_ENDS = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),  # <|end|> only ends a channel in gpt-oss's format
    ({"<|flush|>", "<|calls|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
)
READ = frozenset(
    {"ggml.model", "ggml.pre", "ggml.tokens", "ggml.scores", "ggml.token_type", "ggml.merges", "ggml.add_bos_token"}
    | {"ggml.add_eos_token", "ggml.add_space_prefix", "chat_template", "chat_templates", "huggingface.json"}
    | {f"ggml.{name}_token_id" for name in (*NAMED_TOKENS.values(), *END_KEYS)}
)
WITHOUT_EFFECT = frozenset(
    {"ggml.token_type_count", "ggml.precompiled_charsmap", "ggml.remove_extra_whitespaces"}  # of encoders and T5
    | {"ggml.normalizer.lowercase", "ggml.normalizer.strip_accents", "ggml.added_tokens"}
    | {f"ggml.{name}_token_id" for name in ("seperator", "separator", "cls", "mask", "fim_pre", "fim_suf", "fim_mid")}
    | {f"ggml.{name}_token_id" for name in ("prefix", "suffix", "middle")}
)


LARGE = 50_000  # tokens of a vocabulary that takes seconds
NOUNS = {str: "texts", int: "whole numbers", float: "numbers"}


class GgufTokenizer:
    """Tokenizer that the `fields` of a GGUF file describe. Raises CheckpointError if its tokens and their kinds do not fit."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self.tokens: list[str] = self._table("ggml.tokens", str) or []
        self._types: list[int] = [NORMAL] * len(self.tokens)
        if self.tokens and (types := self._table("ggml.token_type", int)):
            self._check_length("ggml.token_type", types)
            self._types = types

    def _said(self, key: str) -> Any:
        field = self._fields.get(PREFIX + key)
        return None if field is None else field.contents()

    def _table(self, key: str, kind: type) -> list[Any] | None:
        """Return the list under `key`; None if there is none. Raises CheckpointError if it is no list of values of this `kind`."""
        found = self._said(key)
        if found is None or (isinstance(found, list) and all(isinstance(one, kind) for one in found)):
            return found
        raise CheckpointError(f"its {PREFIX}{key} is no list of {NOUNS[kind]}")

    def _needed_table(self, key: str, kind: type, why: str) -> list[Any]:
        if (found := self._table(key, kind)) is None:
            raise CheckpointError(f"it has no {PREFIX}{key}, {why}")
        return found

    def _check_length(self, key: str, table: Sized) -> None:
        if len(table) != len(self.tokens):
            raise CheckpointError(f"its {PREFIX}{key} has {len(table):,} entries for {len(self.tokens):,} tokens")

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids of all tokens that end a text: those named in the file, and the known control tokens of the vocabulary."""
        named = [token for key in END_KEYS if (token := self._token_id(key)) is not None]
        known = {
            text: token
            for token, (text, kind) in enumerate(zip(self.tokens, self._types, strict=True))
            if kind == CONTROL and text in END_TEXTS
        }
        for others, text in NO_ENDS:
            if others <= known.keys():
                known.pop(text, None)
        return tuple(dict.fromkeys([*named, *known.values()]))

    def token_ids(self) -> dict[str, int]:
        """Return the ids of the first and the padding token, by their names in generation_config.json."""
        found = {f"{name}_token_id": self._token_id(key) for name, key in (("bos", "bos"), ("pad", "padding"))}
        return {name: token for name, token in found.items() if token is not None}

    def write(self, out: Path) -> None:
        """Write tokenizer.json and its config into `out`.

        Raises CheckpointError if the tokenizer has parts that are not supported here, LocalError if the files cannot be written,
        and the errors of `tokenizers` and `transformers`.
        """
        from transformers import PreTrainedTokenizerFast

        for name in self._fields:
            key = name.removeprefix(PREFIX)
            known = key in READ or key in WITHOUT_EFFECT or key.startswith("chat_template.")
            if name.startswith(PREFIX) and not known and self._said(key) not in (False, []):
                raise CheckpointError(
                    f"its {name} is not supported here: put the model's tokenizer.json beside the file"
                )
        make: Any = PreTrainedTokenizerFast
        pre = pre_tokenizer(str(self._said("ggml.pre") or DEFAULT))
        pipeline, merges = self._pipeline(pre)
        named = {
            name: self.tokens[token] for name, key in NAMED_TOKENS.items() if (token := self._token_id(key)) is not None
        }
        kind = self._said("ggml.model")
        adds_bos = self._said("ggml.add_bos_token")
        if adds_bos is None:
            adds_bos = kind == "llama" or (kind == "gpt2" and pre.adds_bos)
        tokenizer = make(
            tokenizer_object=_Uncopied(pipeline),
            **{"bos_token": None, "eos_token": None, **named},
            add_bos_token=bool(adds_bos) and "bos_token" in named and kind != "gemma4",  # Gemma 4's template writes it
            add_eos_token=bool(self._said("ggml.add_eos_token")) and "eos_token" in named,
            clean_up_tokenization_spaces=False,
        )
        # One chat template, or several by name.
        default = self._said("chat_template")
        templates = {name: self._said(f"chat_template.{name}") for name in self._said("chat_templates") or ()}
        templates = {name: str(template) for name, template in templates.items() if template is not None}
        if templates and default is not None:
            templates["default"] = str(default)
        tokenizer.chat_template = templates or (None if default is None else str(default))
        try:
            tokenizer.save_pretrained(out, save_jinja_files=False)
            if merges:
                _write_merges(out / TOKENIZER_NAME, merges)
        except Exception as error:  # tokenizers has no class of its own for a failed write, as on a full disk
            if type(error) is not Exception and not isinstance(error, OSError):
                raise
            raise LocalError(f"the tokenizer cannot be written into {out}: {error}; choose another place") from error

    def _token_id(self, name: str) -> int | None:
        """Return the id under `tokenizer.ggml.NAME_token_id`; None if there is none, or it is outside the vocabulary."""
        token = self._said(f"ggml.{name}_token_id")
        return int(token) if token is not None and 0 <= int(token) < len(self.tokens) else None

    def _pipeline(self, pre: PreTokenizer) -> tuple[Any, Merges]:
        """Return the tokenizer as one of the `tokenizers` library, and the merges that it lacks.

        Raises CheckpointError if it is of another kind.
        """
        from tokenizers import AddedToken, Tokenizer

        kind, whole = str(self._said("ggml.model")), self._said("huggingface.json")
        if whole is not None:
            return Tokenizer.from_str(str(whole)), ()
        if kind not in ("gpt2", "llama", "gemma4"):
            raise CheckpointError(
                f"its tokenizer is of the kind {kind!r}, not byte pairs (gpt2) or SentencePiece (llama)"
            )
        if len(self.tokens) >= LARGE:
            stages.info("Converting a vocabulary of %s tokens", f"{len(self.tokens):,}")
        pipeline, merges = self._byte_pairs(pre) if kind == "gpt2" else self._sentencepiece(kind)
        for kinds, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
            added = [token for token, kind in zip(self.tokens, self._types, strict=True) if kind in kinds]
            add = pipeline.add_special_tokens if special else pipeline.add_tokens
            add([AddedToken(token, normalized=False, special=special) for token in added if token.strip(" ")])
        return pipeline, merges

    def _merges(self, vocabulary: Mapping[str, int]) -> Merges:
        """Return the pairs under `tokenizer.ggml.merges`, first ones first.

        Raises CheckpointError if they are no pairs, or are not in the vocabulary.
        """
        table = self._needed_table(
            "ggml.merges", str, "the pairs that make its tokens: texts would be cut into single bytes"
        )
        merges = [(merge[:cut], merge[cut + 1 :]) for merge in table if (cut := merge.find(" ", 1)) > 0]
        if len(merges) < len(table):
            raise CheckpointError(f"its {PREFIX}ggml.merges has an entry that is no pair of tokens")
        for pair in merges:
            for token in (*pair, "".join(pair)):
                if token not in vocabulary:
                    raise CheckpointError(f"its merges do not fit its tokens: {token[:MAX_TOLD_CHARS]!r} is none")
        if len(set(merges)) < len(merges):  # the last place of a pair counts
            merges = [*dict.fromkeys(reversed(merges))][::-1]
        return merges

    def _byte_pairs(self, pre: PreTokenizer) -> tuple[Any, Merges]:
        from tokenizers import Tokenizer, decoders, models, normalizers

        vocabulary = {token: number for number, token in enumerate(self.tokens)}
        if len(vocabulary) < len(self.tokens):
            raise CheckpointError("its tokenizer has a token twice")
        settings = {"ignore_merges": pre.whole_words, "byte_fallback": not pre.is_bytes}
        pipeline: Any = Tokenizer(models.BPE(vocabulary, [], **settings))
        pipeline.pre_tokenizer = as_pipeline(pre)
        if pre.is_bytes:
            pipeline.decoder = decoders.ByteLevel()
        else:
            spaces = [decoders.Replace(SPACE, " ")] if pre.marks_spaces else []
            pipeline.decoder = decoders.Sequence([*spaces, decoders.ByteFallback(), decoders.Fuse()])
        if pre.marks_spaces:
            pipeline.normalizer = normalizers.Replace(" ", SPACE)
        return pipeline, self._merges(vocabulary)

    def _sentencepiece(self, kind: str) -> tuple[Any, Merges]:
        """Return a SentencePiece tokenizer with the merges that its tokens imply, in the order of their scores; Gemma 4 has its
        own merges. The result is transformers' own, as its classes for Llama, Gemma and Phi-3 have it."""
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        architecture = str(self._fields["general.architecture"].contents())
        is_gemma = kind == "gemma4" or architecture in ("gemma", "gemma2", "gemma3")
        tokens, scores = self.tokens, list[float]()
        if kind == "llama" or "tokenizer.ggml.merges" not in self._fields:
            scores = self._needed_table("ggml.scores", float, "the order in which SentencePiece joins its tokens")
            self._check_length("ggml.scores", scores)
        if is_gemma and kind == "llama":  # spells runs of spaces as spaces, and joins in the order of its tokens
            tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
            scores = [float(-number) for number in range(len(tokens))]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        has_merges = "tokenizer.ggml.merges" in self._fields
        merges = self._merges(vocabulary) if has_merges else implied_merges(dict(zip(tokens, scores, strict=True)))
        unknown = "<unk>" if is_gemma and "<unk>" in vocabulary else None
        pipeline: Any = Tokenizer(models.BPE(vocabulary, [], unk_token=unknown, fuse_unk=True, byte_fallback=True))
        steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if is_gemma:
            pipeline.normalizer = normalizers.Replace(" ", SPACE)
            pipeline.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
        elif self._said("ggml.add_space_prefix") is False:
            pipeline.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)
        else:
            steps.append(decoders.Strip(" ", 1, 0))
            if (
                architecture == "phi3"
            ):  # its space in front comes from a normalizer, which shows in texts that begin with a space
                replace = normalizers.Replace(" ", SPACE)
                pipeline.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
            else:
                pipeline.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
        pipeline.decoder = decoders.Sequence(steps)
        return pipeline, merges


class _Uncopied(NamedTuple):
    """A tokenizer that its next holder takes as it is: transformers would copy it, which takes seconds for a large vocabulary."""

    pipeline: Any

    def __deepcopy__(self, _memo: Any) -> Any:
        return self.pipeline


def _write_merges(file: Path, merges: Merges) -> None:
    """Write merges into a tokenizer.json that has none. `tokenizers` would take seconds for those of a large vocabulary."""
    front, none, rest = file.read_text(encoding="utf-8").rpartition(NO_MERGES)
    assert none, f"{file} has no empty list of merges"
    text = json.dumps(merges, ensure_ascii=False, separators=(",", ":"))
    file.write_text(f"{front}{none.removesuffix('[]')}{text}{rest}", encoding="utf-8")


def implied_merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, by the tokens' `scores`: highest first, then longest left part first."""
    merges = [
        (score, cut, len(token) - cut, token)
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    merges.sort(key=itemgetter(0, 1, 2), reverse=True)
    return [(token[:cut], token[cut:]) for _score, cut, _rest, token in merges]
