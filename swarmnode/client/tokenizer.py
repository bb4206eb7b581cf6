"""Tokenizers: text to token ids and back, by the checkpoint's own tokenizer; and the tokens that end a text."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Union

from swarmnode.codec.body import MAX_STOP_IDS, MAX_TOKEN_ID
from swarmnode.data.conversation import (
    ChatEnding,
    ChatRenderer,
    CheckText,
    Mappings,
    chat_messages,
    chosen_template,
    render_chat,
)
from swarmnode.errors import CheckpointError, UsageError
from swarmnode.files import parse_json
from swarmnode.swarm.storage.content import check_tokenizer
from swarmnode.swarm.storage.own_adapters import AdapterChat

FIRST_TURN, ANSWER = ({"role": "user", "content": "question"},), "answer-and-no-more"
THINK_END = "</think>"  # ends the reasoning before an answer, in most chat templates
MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # of the text that the assistant writes, in a chat template
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte token of tokenizers that fall back to bytes
UNUSED = re.compile(r"[\[<](\|?)(unused|reserved_special_token|reserved)_?\d+\1[\]>]")
UNFINISHED = "\ufffd"  # shown for a part of a character


class Turn(NamedTuple):
    """Turn of a conversation; `role` is system, user or assistant."""

    role: str
    content: str


ChatMessage = Union[Turn, Mapping[str, str]]


def turn_of(message: ChatMessage) -> Turn:
    """Return a message of a conversation as a Turn. Raises UsageError unless it has a role and a content, both strings."""
    if isinstance(message, Turn):
        return message
    if (
        isinstance(message, Mapping)
        and message.keys() == {"role", "content"}
        and all(isinstance(v, str) for v in message.values())
    ):
        return Turn(message["role"], message["content"])
    raise UsageError(
        'a message is a dict with the strings "role" and "content", for example {"role": "user", "content": "Hello"}'
    )


def plain_conversation(turns: Sequence[Turn]) -> str:
    """Return a conversation as one text with a line for each turn, for models that know no roles."""
    return "".join(f"{turn.content}\n" for turn in turns)


class Tokenizer:
    """Tokenizer of a checkpoint folder, by transformers. It never runs code of the checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Raise CheckpointError if the folder has no usable tokenizer."""
        self._folder = folder
        _ = self.own

    @functools.cached_property
    def own(self) -> Any:
        """Tokenizer object of transformers. Raises CheckpointError if it cannot be loaded."""
        from swarmnode.compute.model.lean import lean

        # Not `import transformers`: that returns a module whose import another thread has begun, and transformers replaces that
        # module at the end. On a node's first start, the compute thread imports it at the same time.
        with lean():
            auto: Any = importlib.import_module("transformers.models.auto.tokenization_auto")
        check_tokenizer(self._folder)
        try:
            return auto.AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # tokenizers raises Exception itself
            raise CheckpointError(
                f"the checkpoint's tokenizer cannot be used: {error}; give token ids instead of text"
            ) from error

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt; with `special_tokens`, also those that the model expects around it. Raises UsageError
        if `text` is not valid Unicode."""
        _utf8(text)
        return self._ids(text, special_tokens=special_tokens)

    def encode_pair(self, first: str, second: str, most_tokens: int | None) -> tuple[list[int], bool]:
        """Return the token ids of two texts as one input, and whether the tokenizer marks the second text by segment ids.

        `second` is cut so that the result has at most `most_tokens`. Raises UsageError if a text is no valid Unicode, or if there
        is no room for `second`.
        """
        _utf8(first)
        _utf8(second)
        cut: dict[str, Any] = {} if most_tokens is None else {"truncation": "only_second", "max_length": most_tokens}
        try:
            encoded = self.own(first, second, verbose=False, **cut)
        except Exception as error:  # tokenizers raise an Exception of no type of its own
            raise UsageError(f"the first text leaves no room for the second one: {error}; shorten it") from None
        return list(encoded["input_ids"]), any(encoded.get("token_type_ids") or ())

    @functools.cached_property
    def chat_template(self) -> Any:
        """Chat template, or several by their names; None if the checkpoint has none."""
        return self.own.chat_template

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self.chat_template)

    def encode_chat(self, turns: Sequence[Turn]) -> list[int]:
        """Return the token ids of a conversation that the model is to answer, by the checkpoint's chat template, or as plain text
        if it has none.

        Raises CheckpointError if the template cannot be used.
        """
        if not self.has_chat_template:
            return self.encode(plain_conversation(turns))
        return self.renderer.encode(chat_messages(turn._asdict() for turn in turns))

    @functools.cached_property
    def renderer(self) -> ChatRenderer:
        """Renderer of conversations by the chat template."""
        return ChatRenderer(self)

    def marked_answers(
        self, messages: Mappings, tools: Mappings, variables: Mapping[str, Any]
    ) -> tuple[list[int], list[bool]] | None:
        """Return the tokens of a conversation in the template's format, and which of them the template marks as the assistant's;
        None if the template has no marks. Raises CheckpointError if it cannot be used."""
        turns, offered = list(messages), list(tools)
        if not MARK.search(self.own.get_chat_template(tools=offered or None)):
            return None
        tokens = self.encode_messages(turns, offered, variables, ending=ChatEnding.CLOSED)
        found: Mapping[str, list[int]] = self.own.apply_chat_template(
            turns, tools=offered or None, return_dict=True, return_assistant_tokens_mask=True, **variables
        )
        return tokens, [bool(mark) for mark in found["assistant_masks"]]

    def encode_messages(
        self,
        messages: Mappings,
        tools: Mappings = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        ending: ChatEnding = ChatEnding.ANSWER,
        check_text: CheckText | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation for a checkpoint with a chat template.

        Args:
            messages: Messages in the format that the template takes.
            tools: JSON schemas of tools, in the format of OpenAI's API.
            variables: Further variables of the template.
            ending: How the conversation ends.
            check_text: Function that is called with the number of characters of the whole prompt, before it is tokenized. It
                raises an error if they are too many.

        Returns:
            The token ids.

        Raises:
            UsageError: A message is not valid Unicode.
            CheckpointError: The template cannot be used, or a variable would override a setting.
        """
        from jinja2 import TemplateError

        turns: list[Any] = list(messages)
        offered: list[Any] = list(tools)
        _utf8(json.dumps([turns, offered], ensure_ascii=False, default=str))
        own = self.template_settings & variables.keys()
        if own:  # one of them is the template itself
            raise CheckpointError(
                f"{', '.join(sorted(own))} cannot be set: this is no variable of a chat template; leave it out"
            )
        try:
            return self._chat_ids(turns, offered, {**variables, **ending.value}, check_text)
        except (TemplateError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"the checkpoint's chat template cannot be used: {error}; give plain text instead of messages"
            ) from error

    @functools.cached_property
    def template_settings(self) -> frozenset[str]:
        """Names of the parameters of transformers' `apply_chat_template`; they cannot be variables of a template."""
        return frozenset(inspect.signature(self.own.apply_chat_template).parameters)

    def encode_document(self, text: str) -> list[int]:
        """Return the token ids of a text of any length, without special tokens."""
        return self._ids(text, special_tokens=False)

    @functools.cached_property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by their names in templates."""
        named: dict[str, str] = self.own.special_tokens_map
        return named

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its written form; None if the vocabulary lacks it."""
        found = self.own.convert_tokens_to_ids(token)
        return found if isinstance(found, int) and self.own.convert_ids_to_tokens(found) == token else None

    @functools.cached_property
    def separator(self) -> int | None:
        """Token between two documents: the end of text; None if the checkpoint has none."""
        token: int | None = self.own.eos_token_id
        return token

    @functools.cached_property
    def begin(self) -> int | None:
        """Token that the tokenizer puts before a text (BOS); None if it puts none there."""
        token: int | None = self.own.bos_token_id
        return token if token is not None and self.encode("")[:1] == [token] else None

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer: the end of text, and the token after an answer in the chat template. Empty if the
        checkpoint has neither."""
        ends = (self._end_of_text(), self._end_of_turn())
        return tuple(dict.fromkeys(token for token in ends if token is not None))

    def _end_of_text(self) -> int | None:
        """Return the id of the end of text; None if the vocabulary lacks the token that transformers assumes by default."""
        token, text = self.separator, self.own.eos_token
        return token if token is not None and self.own.convert_ids_to_tokens(token) == text else None

    def _end_of_turn(self) -> int | None:
        """Return the id of the token that the chat template writes after an answer; None if there is none, or the template cannot
        be used."""
        from jinja2 import TemplateError

        if not self.has_chat_template:
            return None
        try:
            text = self._chat_text([*FIRST_TURN, {"role": "assistant", "content": ANSWER}], (), ChatEnding.CLOSED.value)
        except (TemplateError, ValueError, KeyError, TypeError, AttributeError, LookupError, RecursionError):
            return None
        _, found, behind = text.rpartition(ANSWER)
        behind = behind.lstrip()
        tokens = {str(added): token for token, added in self.own.added_tokens_decoder.items() if str(added).strip()}
        end = max((token for token in tokens if behind.startswith(token)), key=len, default="")
        # Some templates always begin another answer: a role's name follows that token.
        return tokens[end] if found and end and not behind[len(end) :][:1].isalnum() else None

    def _chat_text(self, messages: Mappings, tools: Mappings, variables: Mapping[str, Any]) -> str:
        """Render a conversation by the chat template. Raises the errors of transformers and jinja if it cannot be used."""
        turns: list[Any] = list(messages)
        offered: list[Any] = list(tools)
        return str(self.own.apply_chat_template(turns, tools=offered or None, tokenize=False, **variables))

    @property
    def reasons(self) -> bool:
        """Whether the model reasons before it answers, by its chat template."""
        return THINK_END in str(self.chat_template)

    @functools.cached_property
    def has_response_template(self) -> bool:
        """Whether the checkpoint has a response template, which defines the format of answers."""
        return getattr(self.own, "response_template", None) is not None

    def response_parser(self, prompt: Sequence[int], tools: Mappings) -> Any:
        """Return transformers' parser of the answer to `prompt`; it needs special tokens in the text. Raises CheckpointError if the
        response template cannot be used."""
        offered: list[Any] = list(tools)
        try:
            return self.own.get_response_parser(prefix=list(prompt), tools=offered)
        except (AttributeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's response template cannot be used: {error}") from error

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text of tokens, with special tokens if `special_tokens` is true."""
        return str(self.own.decode(list(ids), skip_special_tokens=not special_tokens))

    def decode_token(self, token: int) -> str:
        """Return the text of a single token, even of a special one."""
        return self.decode([token], special_tokens=True)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, even if they are only a part of a character."""
        text = self.decode_token(token)
        return text.encode() if UNFINISHED not in text else _bytes_of(self._piece(token)) or text.encode()

    def is_special(self, token: int) -> bool:
        """Return whether the token is special, so that texts leave it out."""
        return not self.decode([token]) and bool(self.decode_token(token))

    def _piece(self, token: int) -> str:
        return str(self.own.convert_ids_to_tokens(token) or "")

    def unused(self, ids: Iterable[int]) -> int | None:
        """Return the first of `ids` that no token has, or whose token is reserved for later; None if all are in use."""
        return next((token for token in ids if not (piece := self._piece(token)) or UNUSED.fullmatch(piece)), None)

    def _chat_ids(
        self, messages: list[Any], tools: list[Any], variables: Mapping[str, Any], check_text: CheckText | None
    ) -> list[int]:
        if check_text is not None:
            check_text(len(self._chat_text(messages, tools, variables)))
        return list(self.own.apply_chat_template(messages, tools=tools or None, return_dict=False, **variables))

    def _ids(self, text: str, *, special_tokens: bool) -> list[int]:
        return list(self.own(text, add_special_tokens=special_tokens, verbose=False)["input_ids"])


class AdapterTokenizer(Tokenizer):
    """Tokenizer of a checkpoint with the chat template of an adapter and the special tokens that the template names. `render` is
    `render_chat`, or does the same elsewhere."""

    def __init__(self, base: Tokenizer, chat: AdapterChat, render: Callable[..., str] = render_chat) -> None:
        self._base = base
        self._render = render
        self.chat_template = chat.template
        named = {**base.special_tokens, **chat.tokens}
        self.special_tokens = {name: token for name, token in named.items() if token}
        end = chat.tokens.get("eos_token")
        self.separator = base.token_id(end) if end else base.separator
        self.has_response_template = False  # the checkpoint's belongs to its own chat template

    @property
    def own(self) -> Any:
        return self._base.own

    @property
    def template_settings(self) -> frozenset[str]:  # type: ignore[override]  # cached there
        return self._base.template_settings

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        return self._base.decode(ids, special_tokens=special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._base.token_id(token)

    def _end_of_text(self) -> int | None:
        return self.separator

    def _chat_text(self, messages: Mappings, tools: Mappings, variables: Mapping[str, Any]) -> str:
        template = chosen_template(self.chat_template, with_tools=bool(tools))
        if template is None:
            raise ValueError("the adapter has no template called default")
        return self._render(template, messages, tools, {**self.special_tokens, **variables})

    def _chat_ids(
        self, messages: list[Any], tools: list[Any], variables: Mapping[str, Any], check_text: CheckText | None
    ) -> list[int]:
        text = self._chat_text(messages, tools, variables)
        if check_text is not None:
            check_text(len(text))
        return self._ids(text, special_tokens=False)

    def _piece(self, token: int) -> str:
        return self._base._piece(token)

    def _ids(self, text: str, *, special_tokens: bool) -> list[int]:
        return self._base._ids(text, special_tokens=special_tokens)


class ByteTokenizer:
    """Tokenizer for models that were trained without one: every byte of the text is a token."""

    separator = 0  # text contains no byte of this value
    has_chat_template = False

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the bytes of a prompt. Raises UsageError if `text` is not valid Unicode."""
        return list(_utf8(text))

    def encode_chat(self, turns: Sequence[Turn]) -> list[int]:
        """Return the bytes of a conversation, written as one text."""
        return self.encode(plain_conversation(turns))

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text of generated bytes. Tokens above 255 and invalid UTF-8 become replacement characters."""
        return b"".join(bytes([token]) if token < 256 else b"\xff" for token in ids).decode(errors="replace")

    def decode_token(self, token: int) -> str:
        """Return the text of a single token."""
        return self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        """Return the byte of a token; for a token above 255, the bytes of a replacement character."""
        return bytes([token]) if token < 256 else UNFINISHED.encode()

    def is_special(self, token: int) -> bool:
        """Return False: no token is special."""
        return False

    def unused(self, ids: Iterable[int]) -> int | None:
        """Return the first of `ids` above 255; None if all are bytes."""
        return next((token for token in ids if token > 255), None)


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return the bytes by the characters that byte-level tokenizers write for them (GPT-2's): printable ones stand for themselves,
    others are numbered from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _bytes_of(piece: str) -> bytes:
    """Return the bytes of a token from its written form: `<0xE2>`, or characters of the byte alphabet. Empty if it is neither."""
    if fallback := BYTE.fullmatch(piece):
        return bytes([int(fallback[1], 16)])
    alphabet = _byte_alphabet()
    return bytes(alphabet[char] for char in piece) if all(char in alphabet for char in piece) else b""


class Detokenizer:
    """Converter of tokens to text while they arrive, a whole character at a time.

    The text of a token depends on its neighbours, so each is decoded together with the tokens of the last piece, as text-generation
    servers do (TGI, vLLM). A token costs the same however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer | ByteTokenizer, *, special_tokens: bool = False) -> None:
        self._decode = functools.partial(tokenizer.decode, special_tokens=special_tokens)
        self._emitted: list[int] = []  # the tokens of the last piece
        self._emitted_text = ""  # and their text by themselves
        self._open: list[int] = []  # tokens that no piece contains yet
        self.rest = ""

    def push(self, token: int) -> str:
        """Add a token and return the text that it completes; empty if it ends within a character."""
        self._open.append(token)
        self.rest = self._decode(self._emitted + self._open)[len(self._emitted_text) :]
        if not self.rest or self.rest.endswith(UNFINISHED):
            return ""
        self._emitted, self._open = self._open, []
        self._emitted_text = self._decode(self._emitted)
        piece, self.rest = self.rest, ""
        return piece


def _utf8(text: str) -> bytes:
    """Encode a text as UTF-8. Raises UsageError if it contains half of a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise UsageError(
            f"this is no valid text: {half} in it is half of a character (a lone surrogate); remove it"
        ) from None


def stop_ids(folder: Path, tokenizer: Tokenizer | ByteTokenizer | None = None) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text: those that the configs in `folder` name, and those of `tokenizer`. Invalid ids
    are left out."""
    named: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        found = read_config(folder / name).get("eos_token_id")
        if found is not None:
            named = found if isinstance(found, list) else [found]
            break
    ends = [*named, *(tokenizer.ends if isinstance(tokenizer, Tokenizer) else ())]
    return tuple(dict.fromkeys(end for end in ends if type(end) is int and 0 <= end <= MAX_TOKEN_ID))[:MAX_STOP_IDS]


def vocabulary_size(folder: Path) -> int | None:
    """Return the number of token ids that the model knows; None if its config does not say."""
    size = read_config(folder / "config.json").get("vocab_size")
    return size if isinstance(size, int) else None


def read_config(path: Path) -> dict[str, Any]:
    """Return the values of a checkpoint's JSON file; empty if it is missing, damaged, or no object."""
    try:
        values = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
