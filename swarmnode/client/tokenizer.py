"""Text to token ids and back, by the checkpoint's own tokenizer; and the tokens that end a text."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Union

from swarmnode.codec.body import MAX_STOP_IDS, MAX_TOKEN_ID
from swarmnode.errors import CheckpointError, UsageError

FIRST_TURN, ANSWER = ({"role": "user", "content": "question"},), "answer-and-no-more"
THINK_END = "</think>"  # of what a model thinks before it answers, in most chat templates
Message = dict[str, Any]  # as chat templates take it
SYSTEM, USER = "system", "user"
PARAGRAPH = "\n\n"
GREETING: Message = {"role": USER, "content": "hi"}
TRIALS = ("hens", "eggs")  # what a template shows of them makes a difference in the ids
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # of tokenizers that fall back to bytes
UNUSED = re.compile(r"[\[<](\|?)(unused|reserved_special_token|reserved)_?\d+\1[\]>]")
UNFINISHED = "\ufffd"  # what a part of a character is shown as


class Turn(NamedTuple):
    """What one side of a conversation said; `role` is system, user or assistant."""

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


class ChatEnding(Enum):
    """How a conversation ends: with the beginning of an answer, or with the last message, which goes on or is closed. By
    transformers' settings."""

    ANSWER = MappingProxyType({"add_generation_prompt": True})
    CONTINUED = MappingProxyType({"add_generation_prompt": False, "continue_final_message": True})
    CLOSED = MappingProxyType({"add_generation_prompt": False})


def plain_conversation(turns: Sequence[Turn]) -> str:
    """A conversation with a model that knows no roles: one text, a line for each turn, which it continues."""
    return "".join(f"{turn.content}\n" for turn in turns)


def without_system(turns: Sequence[Message]) -> list[Message]:
    """Return a conversation with what the system says before what the user says next."""
    told: list[Message] = []
    waiting: list[str] = []
    for turn in turns:
        if turn["role"] == SYSTEM:
            waiting.append(turn["content"])
        elif turn["role"] == USER and waiting:
            told.append({**turn, "content": PARAGRAPH.join([*waiting, turn["content"]])})
            waiting = []
        else:
            told.append(turn)
    return [*told, {"role": USER, "content": PARAGRAPH.join(waiting)}] if waiting else told


class Tokenizer:
    """transformers' tokenizer of a checkpoint folder. No code of the checkpoint is ever run."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError where there is none in the folder."""
        self._folder = folder
        _ = self.own

    def __repr__(self) -> str:
        return f"<Tokenizer of {len(self.own)} tokens>"

    @functools.cached_property
    def own(self) -> Any:
        """As transformers has it. Raises CheckpointError."""
        from swarmnode.compute.model.lean import models_listed_once

        # Not `import transformers`: that gives the module which another thread has begun to import, and transformers puts
        # another one in its place at the end. On a node's first start the compute thread is at it.
        transformers: Any = importlib.import_module("transformers")
        try:
            with models_listed_once():
                return transformers.AutoTokenizer.from_pretrained(
                    self._folder, local_files_only=True, trust_remote_code=False
                )
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"the checkpoint's tokenizer cannot be used: {error}") from error

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects. Raises UsageError where it is no text."""
        _utf8(text)
        return self._ids(text, special_tokens=special_tokens)

    def encode_pair(self, first: str, second: str, most_tokens: int | None) -> list[int]:
        """Return the token ids of two texts as one input, with the special tokens between them.

        `second` is cut so that the result has at most `most_tokens`. Raises UsageError if a text is no valid Unicode, or if there
        is no room for `second`.
        """
        _utf8(first)
        _utf8(second)
        cut: dict[str, Any] = {} if most_tokens is None else {"truncation": "only_second", "max_length": most_tokens}
        try:
            return list(self.own(first, second, verbose=False, **cut)["input_ids"])
        except Exception as error:  # tokenizers raise an Exception of no type of its own
            raise UsageError(f"the first text leaves no room for the second one: {error}") from None

    @functools.cached_property
    def chat_template(self) -> Any:
        """How a conversation is written, or several ways by their names; None where it does not say."""
        return self.own.chat_template

    @property
    def has_chat_template(self) -> bool:
        """Whether it knows how a conversation is written."""
        return bool(self.chat_template)

    def encode_chat(self, turns: Sequence[Turn]) -> list[int]:
        """Token ids of a conversation that the model is to answer, by the checkpoint's chat template: plain text where it has none.

        Raises CheckpointError where the template cannot be used on it.
        """
        if not self.has_chat_template:
            return self.encode(plain_conversation(turns))
        messages = [turn._asdict() for turn in turns]
        tells_system = any(turn.role == SYSTEM for turn in turns)
        return self.encode_messages(without_system(messages) if tells_system and not self.shows_system else messages)

    def shows(self, conversation: Callable[[str], tuple[list[Message], Sequence[Message]]]) -> bool:
        """Whether the chat template shows a text in the messages and tools that `conversation` makes of it."""
        try:
            first, second = (self.encode_messages(*conversation(text)) for text in TRIALS)
        except CheckpointError:
            return False
        return first != second

    @functools.cached_property
    def shows_system(self) -> bool:
        """Whether the chat template knows what the system says."""
        return self.shows(lambda text: ([{"role": SYSTEM, "content": text}, GREETING], ()))

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        ending: ChatEnding = ChatEnding.ANSWER,
    ) -> list[int]:
        """The same for a checkpoint that has a template: each message is whatever that one takes, and each tool a JSON schema as
        OpenAI's API has it; `variables` are what else the template knows. Raises UsageError where a message is no text."""
        from jinja2 import TemplateError

        turns: list[Any] = list(messages)
        offered: list[Any] = list(tools)
        _utf8(json.dumps([turns, offered], ensure_ascii=False, default=str))
        own = self.template_settings & variables.keys()
        if own:  # one of them is the template itself
            raise CheckpointError(f"{', '.join(sorted(own))} cannot be set: that is no variable of a chat template")
        try:
            return self._chat_ids(turns, offered, {**variables, **ending.value})
        except (TemplateError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"the checkpoint's chat template cannot be used: {error}") from error

    @functools.cached_property
    def template_settings(self) -> frozenset[str]:
        """What transformers lets a caller set about a conversation, and is therefore no variable of a template."""
        return frozenset(inspect.signature(self.own.apply_chat_template).parameters)

    def encode_document(self, text: str) -> list[int]:
        """Token ids of a text of any length, without special tokens."""
        return self._ids(text, special_tokens=False)

    @functools.cached_property
    def separator(self) -> int | None:
        """The token between two documents: the end of text, where there is one."""
        token: int | None = self.own.eos_token_id
        return token

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer: the end of text, and the one behind an answer in the chat template. Empty if the
        checkpoint knows neither."""
        ends = (self._end_of_text(), self._end_of_turn())
        return tuple(dict.fromkeys(token for token in ends if token is not None))

    def _end_of_text(self) -> int | None:
        """The end of text; None if the vocabulary lacks the one that transformers assumes where none is named."""
        token, text = self.separator, self.own.eos_token
        return token if token is not None and self.own.convert_ids_to_tokens(token) == text else None

    def _end_of_turn(self) -> int | None:
        """The token that the chat template writes behind an answer; None if it writes none, or has another way with messages."""
        from jinja2 import TemplateError

        if not self.has_chat_template:
            return None
        try:
            text = str(
                self.own.apply_chat_template(
                    [*FIRST_TURN, {"role": "assistant", "content": ANSWER}], tokenize=False, add_generation_prompt=False
                )
            )
        except (TemplateError, ValueError, KeyError, TypeError, AttributeError, LookupError, RecursionError):
            return None
        _, found, behind = text.rpartition(ANSWER)
        behind = behind.lstrip()
        tokens = {str(added): token for token, added in self.own.added_tokens_decoder.items() if str(added).strip()}
        end = max((token for token in tokens if behind.startswith(token)), key=len, default="")
        # Some templates begin another answer whatever they are told: a role's name follows that token.
        return tokens[end] if found and end and not behind[len(end) :][:1].isalnum() else None

    @property
    def reasons(self) -> bool:
        """Whether its model thinks before it answers, as the chat template says."""
        return THINK_END in str(self.chat_template)

    @functools.cached_property
    def has_response_template(self) -> bool:
        """Whether the checkpoint says how its answers are written."""
        return getattr(self.own, "response_template", None) is not None

    def response_parser(self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Any:
        """transformers' parser of what follows this prompt, which wants special tokens, too. Raises CheckpointError where the
        checkpoint says wrongly how its answers are written."""
        offered: list[Any] = list(tools)
        try:
            return self.own.get_response_parser(prefix=list(prompt), tools=offered)
        except (AttributeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's response template cannot be used: {error}") from error

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """The text of generated tokens, with special tokens where they are wanted."""
        return str(self.own.decode(list(ids), skip_special_tokens=not special_tokens))

    def decode_token(self, token: int) -> str:
        """The text of one token by itself, also of a special one."""
        return self.decode([token], special_tokens=True)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, also where they are a part of a character only."""
        text = self.decode_token(token)
        return text.encode() if UNFINISHED not in text else _bytes_of(self._piece(token)) or text.encode()

    def is_special(self, token: int) -> bool:
        """Whether texts are told without this token."""
        return not self.decode([token]) and bool(self.decode_token(token))

    def _piece(self, token: int) -> str:
        return str(self.own.convert_ids_to_tokens(token) or "")

    def unused(self, ids: Iterable[int]) -> int | None:
        """The first of these ids that stands for nothing: no token has it, or one that was left for later. None where none does."""
        return next((token for token in ids if not (piece := self._piece(token)) or UNUSED.fullmatch(piece)), None)

    def _chat_ids(self, messages: list[Any], tools: list[Any], variables: Mapping[str, Any]) -> list[int]:
        return list(self.own.apply_chat_template(messages, tools=tools or None, return_dict=False, **variables))

    def _ids(self, text: str, *, special_tokens: bool) -> list[int]:
        return list(self.own(text, add_special_tokens=special_tokens, verbose=False)["input_ids"])


class ByteTokenizer:
    """Every byte of the text is a token: for models that were trained without a tokenizer."""

    separator = 0  # text has no byte of this value

    def __repr__(self) -> str:
        return "<ByteTokenizer>"

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The bytes of a prompt. Raises UsageError where it is no text."""
        return list(_utf8(text))

    def encode_chat(self, turns: Sequence[Turn]) -> list[int]:
        """The bytes of a conversation, as one text."""
        return self.encode(plain_conversation(turns))

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """The text of generated bytes, of which none is special; tokens past 255 and bytes that are no UTF-8 are shown as such."""
        return b"".join(bytes([token]) if token < 256 else b"\xff" for token in ids).decode(errors="replace")

    def decode_token(self, token: int) -> str:
        """The text of one token by itself."""
        return self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        """The byte that a token is."""
        return bytes([token]) if token < 256 else UNFINISHED.encode()

    def is_special(self, token: int) -> bool:
        """No token is."""
        return False

    def unused(self, ids: Iterable[int]) -> int | None:
        """The first of these ids that is no byte. None where all are."""
        return next((token for token in ids if token > 255), None)


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes as (GPT-2's): printable ones as themselves, others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _bytes_of(piece: str) -> bytes:
    """The bytes of a token as its tokenizer writes it: `<0xE2>`, or characters of the byte alphabet. Empty where it is neither."""
    if fallback := BYTE.fullmatch(piece):
        return bytes([int(fallback[1], 16)])
    alphabet = _byte_alphabet()
    return bytes(alphabet[char] for char in piece) if all(char in alphabet for char in piece) else b""


class Detokenizer:
    """The text of tokens as they come, a whole character at a time.

    How a token is written depends on its neighbours, so each is decoded with those of the piece before it, as text-generation
    servers do (TGI, vLLM): a token costs the same however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer | ByteTokenizer, *, special_tokens: bool = False) -> None:
        self._decode = functools.partial(tokenizer.decode, special_tokens=special_tokens)
        self._told: list[int] = []  # the tokens of the last piece
        self._told_text = ""  # and what they are by themselves
        self._open: list[int] = []  # what no piece has told yet
        self.rest = ""

    def __repr__(self) -> str:
        return f"<Detokenizer with {len(self._open)} tokens of an unfinished character>"

    def push(self, token: int) -> str:
        """What this token adds; nothing where it ends in the middle of a character."""
        self._open.append(token)
        self.rest = self._decode(self._told + self._open)[len(self._told_text) :]
        if not self.rest or self.rest.endswith(UNFINISHED):
            return ""
        self._told, self._open = self._open, []
        self._told_text = self._decode(self._told)
        piece, self.rest = self.rest, ""
        return piece


def _utf8(text: str) -> bytes:
    """Raises UsageError where it holds half of a character."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise UsageError(
            f"this is no text: {half} in it is half of a character (a surrogate without the other)"
        ) from None


def stop_ids(folder: Path, tokenizer: Tokenizer | ByteTokenizer | None = None) -> tuple[int, ...]:
    """Return the tokens that end a text: those that a checkpoint's configs name, and those of its `tokenizer`. Ids that are none
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
    """How many token ids the model knows, where its config says so."""
    size = read_config(folder / "config.json").get("vocab_size")
    return size if isinstance(size, int) else None


def read_config(path: Path) -> dict[str, Any]:
    """Return the values of a checkpoint's JSON file; empty if it is missing, damaged, or no object."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
