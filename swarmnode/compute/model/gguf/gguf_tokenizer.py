r"""The tokenizer within a GGUF file: its conversion into files for transformers, and the tokens that end a text.

Byte-pair vocabularies are built here, because transformers splits most of them in GPT-2's way, and drops special tokens that are
not spelled in its alphabet of bytes (DeepSeek's). SentencePiece vocabularies are left to transformers.

Splitting of text before a byte-pair tokenizer of a GGUF file merges, by the names of `tokenizer.ggml.pre`.

A name stands for regular expressions that are applied one after the other. Each cuts its matches out of the pieces that the
earlier ones left. They come from the models' own tokenizer.json files; llama.cpp rewrites them where its engine lacks a feature
(`(?i:…)`, `\p{Lu}`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any, NamedTuple

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

    def write(self, file: Path, out: Path) -> None:
        """Write tokenizer.json and its config into `out`.

        Raises CheckpointError if the tokenizer has parts that are not supported here, LocalError if tokenizer.json cannot be
        written, OSError if its config cannot, and the errors of `tokenizers` and `transformers`.
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
        pipeline = self._pipeline(pre, file)
        named = {
            name: self.tokens[token] for name, key in NAMED_TOKENS.items() if (token := self._token_id(key)) is not None
        }
        kind = self._said("ggml.model")
        adds_bos = self._said("ggml.add_bos_token")
        if adds_bos is None:
            adds_bos = kind == "llama" or (kind == "gpt2" and pre.adds_bos)
        tokenizer = make(
            tokenizer_object=pipeline,
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
        except Exception as error:  # of tokenizers, which has no class of its own for a failed write, as on a full disk
            if type(error) is not Exception:
                raise
            raise LocalError(f"the tokenizer cannot be written into {out}: {error}; choose another place") from error

    def _token_id(self, name: str) -> int | None:
        """Return the id under `tokenizer.ggml.NAME_token_id`; None if there is none, or it is outside the vocabulary."""
        token = self._said(f"ggml.{name}_token_id")
        return int(token) if token is not None and 0 <= int(token) < len(self.tokens) else None

    def _pipeline(self, pre: PreTokenizer, file: Path) -> Any:
        from tokenizers import Tokenizer

        kind, whole = str(self._said("ggml.model")), self._said("huggingface.json")
        if whole is not None:
            return Tokenizer.from_str(str(whole))
        if kind == "gpt2":
            return self._byte_pairs(pre)
        if kind in ("llama", "gemma4"):
            return self._sentencepiece(file)
        raise CheckpointError(f"its tokenizer is of the kind {kind!r}, not byte pairs (gpt2) or SentencePiece (llama)")

    def _byte_pairs(self, pre: PreTokenizer) -> Any:
        from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

        vocabulary = {token: number for number, token in enumerate(self.tokens)}
        if len(vocabulary) < len(self.tokens):
            raise CheckpointError("its tokenizer has a token twice")
        table = self._needed_table(
            "ggml.merges", str, "the pairs that make its tokens: texts would be cut into single bytes"
        )
        merges = [(merge[:cut], merge[cut + 1 :]) for merge in table if (cut := merge.find(" ", 1)) > 0]
        if len(merges) < len(table):
            raise CheckpointError(f"its {PREFIX}ggml.merges has an entry that is no pair of tokens")
        try:
            model = models.BPE(vocabulary, merges, ignore_merges=pre.whole_words, byte_fallback=not pre.is_bytes)
        except Exception as error:  # tokenizers raises no other class
            raise CheckpointError(f"its merges do not fit its tokens: {error}") from error
        pipeline: Any = Tokenizer(model)
        pipeline.pre_tokenizer = as_pipeline(pre)
        if pre.is_bytes:
            pipeline.decoder = decoders.ByteLevel()
        else:
            spaces = [decoders.Replace(SPACE, " ")] if pre.marks_spaces else []
            pipeline.decoder = decoders.Sequence([*spaces, decoders.ByteFallback(), decoders.Fuse()])
        if pre.marks_spaces:
            pipeline.normalizer = normalizers.Replace(" ", SPACE)
        for kinds, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
            added = [token for token, kind in zip(self.tokens, self._types, strict=True) if kind in kinds]
            add = pipeline.add_special_tokens if special else pipeline.add_tokens
            add([AddedToken(token, normalized=False, special=special) for token in added])
        return pipeline

    def _sentencepiece(self, file: Path) -> Any:
        from tokenizers import decoders, pre_tokenizers
        from transformers import AutoTokenizer

        stages.info("Converting a vocabulary of %s tokens", f"{len(self.tokens):,}")  # takes a minute on a slow machine
        if self._said("ggml.model") == "llama":
            scores = self._needed_table("ggml.scores", float, "the order in which SentencePiece joins its tokens")
            self._check_length("ggml.scores", scores)
        auto: Any = AutoTokenizer
        own = auto.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
        pipeline = own.backend_tokenizer
        if self._said("ggml.add_space_prefix") is False and not isinstance(
            pipeline.pre_tokenizer, pre_tokenizers.Split
        ):
            pipeline.normalizer = None
            pipeline.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)
            steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
            pipeline.decoder = decoders.Sequence(steps)
        return pipeline
