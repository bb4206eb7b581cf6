"""The tokenizer within a GGUF file: its conversion into files for transformers, and the tokens that end a text.

Byte-pair vocabularies are built here, because transformers splits most of them in GPT-2's way, and drops special tokens that are
not spelled in its alphabet of bytes (DeepSeek's). SentencePiece vocabularies are left to transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

from swarmnode.compute.model.dequantize.pre_tokenizer import DEFAULT, PreTokenizer, as_pipeline, pre_tokenizer
from swarmnode.errors import CheckpointError, LocalError

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

    def __repr__(self) -> str:
        return f"<GgufTokenizer of {len(self.tokens)} tokens>"

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

    def _check(self) -> None:
        """Raise CheckpointError if a tokenizer key is set that is neither read here nor known to have no effect."""
        for name in self._fields:
            key = name.removeprefix(PREFIX)
            known = key in READ or key in WITHOUT_EFFECT or key.startswith("chat_template.")
            if name.startswith(PREFIX) and not known and self._said(key) not in (False, []):
                raise CheckpointError(
                    f"its {name} is not supported here: put the model's tokenizer.json beside the file"
                )

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

        self._check()
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
        tokenizer.chat_template = self._templates()
        try:
            tokenizer.save_pretrained(out, save_jinja_files=False)
        except (
            Exception
        ) as error:  # the tokenizers library has no class of its own for a failed write, as on a full disk
            if type(error) is not Exception:
                raise
            raise LocalError(f"the tokenizer cannot be written into {out}: {error}; choose another place") from error

    def _templates(self) -> str | dict[str, str] | None:
        """Return the chat template, or several by name; None if the file has none."""
        default = self._said("chat_template")
        named = {name: self._said(f"chat_template.{name}") for name in self._said("chat_templates") or ()}
        named = {name: str(template) for name, template in named.items() if template is not None}
        if not named:
            return None if default is None else str(default)
        return {**named, **({} if default is None else {"default": str(default)})}

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
