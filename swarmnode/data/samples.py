"""Samples: the tokens of one document or conversation, with labels for the tokens that the model is to learn.

A record has `messages` (and perhaps `tools`), `prompt` and `completion` (texts, or lists of messages), or `text`. Labels follow
from the record's kind: of a conversation the assistant's answers, of a pair the completion, of a text every token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from swarmnode.counting import common_beginning
from swarmnode.data.records import DataRecord, holds_records, read_records
from swarmnode.errors import CheckpointError, UsageError

MAX_MESSAGES = 4096  # of one conversation
ASSISTANT = "assistant"
ARRAYS_SUFFIX = ".npz"
Message = Mapping[str, Any]


class LearntTokens(Enum):
    """Tokens that count in the loss of conversations and pairs."""

    ANSWERS = "answers"
    ALL = "all"


class SampleTokenizer(Protocol):
    """Interface to a tokenizer that samples are made with (`client/tokenizer.py`)."""

    @property
    def end(self) -> int | None:
        """Token that ends a text; None if the model has none."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be used."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special tokens that the model expects around it."""

    def chat(self, messages: Sequence[Message], tools: Sequence[Any], *, begins_answer: bool) -> list[int]:
        """Return the tokens of a conversation by the chat template; with `begins_answer` up to the answer that follows."""

    def answers(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[int], list[bool]] | None:
        """Return the tokens of a conversation, and which of them the template marks as the assistant's; None if it marks none."""


class TokenSample(NamedTuple):
    """TokenSample of N tokens; `counts` says for each token whether it is a label that counts."""

    tokens: list[int]
    counts: list[bool]


def read_samples(
    path: Path, tokenizer: SampleTokenizer, loss: LearntTokens = LearntTokens.ANSWERS
) -> Iterator[TokenSample]:
    """Yield the samples of a file of records, in order; a record of several answers may give several.

    Raises UsageError, naming the file and the line, for a record that gives no sample, or is of another kind than the first one.
    """
    kind: frozenset[str] | None = None
    for record in read_records(path):
        own = _kind(record)
        kind = own if kind is None else kind
        if own != kind:
            raise UsageError(
                f"{record.place}: has {_named(own)}, but the first record has {_named(kind)}; use one kind"
            )
        try:
            yield from _samples(record, own, tokenizer, loss)
        except CheckpointError as error:
            raise UsageError(f"{record.place}: {error}") from None


ARRAYS, TEXT = frozenset({"input_ids"}), frozenset({"text"})
KINDS = (frozenset({"messages"}), frozenset({"prompt", "completion"}), TEXT)


def _kind(record: DataRecord) -> frozenset[str]:
    for kind in KINDS:
        if kind <= record.fields.keys():
            return kind
    found = ", ".join(sorted(record.fields)) or "nothing"
    raise UsageError(f'{record.place}: has {found}; give "messages", "prompt" and "completion", or "text"')


def sample_kind(path: Path) -> frozenset[str]:
    """Return the names of the fields that make the first record of a file a sample; TEXT for files and folders of plain text.

    Raises UsageError if there is no record.
    """
    if not holds_records(path):
        return ARRAYS if path.suffix == ARRAYS_SUFFIX else TEXT
    for record in read_records(path):
        return _kind(record)
    raise UsageError(f"{path} is empty: there is no record in it; give a file with records")


def _named(kind: Iterable[str]) -> str:
    return " and ".join(sorted(kind))


def _samples(
    record: DataRecord, kind: frozenset[str], tokenizer: SampleTokenizer, loss: LearntTokens
) -> Iterator[TokenSample]:
    fields = record.fields
    if "messages" in kind:
        tools = _tools(record)
        found = conversation(_messages(record, fields["messages"]), tools, tokenizer, loss)
    elif "text" in kind:
        tokens = _ended(tokenizer.encode(_text(record, "text")), tokenizer)
        found = [TokenSample(tokens, [True] * len(tokens))]
    elif isinstance(fields["prompt"], list):
        prompt, completion = (_messages(record, fields[name]) for name in ("prompt", "completion"))
        found = [_told_pair(prompt, completion, _tools(record), tokenizer, loss)]
    else:
        found = [_pair(_text(record, "prompt"), _text(record, "completion"), tokenizer, loss)]
    if not any(any(sample.counts[1:]) for sample in found):
        raise UsageError(f"{record.place}: no token in it counts as a label; leave the record out, or give --loss all")
    yield from found


def conversation(
    messages: Sequence[Message], tools: Sequence[Any], tokenizer: SampleTokenizer, loss: LearntTokens
) -> list[TokenSample]:
    """Return the samples of a conversation.

    Answers are found by the template's own marks. Without marks they are the tokens that an answer adds to the conversation
    before it. A template that writes earlier answers in another way than the last one gives a sample
    for each answer, whose loss is on the last answer alone.

    Raises CheckpointError if the template cannot be used.
    """
    if loss is LearntTokens.ALL:
        tokens = tokenizer.chat(messages, tools, begins_answer=False)
        return [TokenSample(tokens, [True] * len(tokens))]
    marked = tokenizer.answers(messages, tools)
    if marked is not None:
        return [TokenSample(*marked)]
    turns = [number for number, message in enumerate(messages) if message.get("role") == ASSISTANT]
    apart = [_told_pair(messages[:turn], messages[turn : turn + 1], tools, tokenizer, loss) for turn in turns]
    whole = tokenizer.chat(messages, tools, begins_answer=False)
    if all(whole[: len(sample.tokens)] == sample.tokens for sample in apart):
        counts = [False] * len(whole)
        for sample in apart:
            for place, does in enumerate(sample.counts):
                counts[place] |= does
        return [TokenSample(whole, counts)]
    return apart


def _told_pair(
    prompt: Sequence[Message],
    completion: Sequence[Message],
    tools: Sequence[Any],
    tokenizer: SampleTokenizer,
    loss: LearntTokens,
) -> TokenSample:
    """Return the sample of messages whose last ones are to be learnt."""
    whole = tokenizer.chat([*prompt, *completion], tools, begins_answer=False)
    told = tokenizer.chat(prompt, tools, begins_answer=True) if prompt else []
    return TokenSample(whole, _after(common_beginning(told, whole), whole, loss))


def _pair(prompt: str, completion: str, tokenizer: SampleTokenizer, loss: LearntTokens) -> TokenSample:
    whole = _ended(tokenizer.encode(prompt + completion), tokenizer)
    return TokenSample(whole, _after(common_beginning(tokenizer.encode(prompt), whole), whole, loss))


def _after(begin: int, tokens: Sequence[int], loss: LearntTokens) -> list[bool]:
    """Return which tokens are learnt. A tokenizer may join the last letters of a prompt with the next ones: so `begin` is where the
    whole text first differs from the prompt."""
    return [loss is LearntTokens.ALL or place >= begin for place in range(len(tokens))]


def _ended(tokens: list[int], tokenizer: SampleTokenizer) -> list[int]:
    """Return the tokens with the token that ends a text at their end, once."""
    end = tokenizer.end
    return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


def _text(record: DataRecord, name: str) -> str:
    text = record.fields[name]
    if not isinstance(text, str):
        raise UsageError(f'{record.place}: its "{name}" is not text; write a string there')
    return text


def _messages(record: DataRecord, messages: Any) -> list[Message]:
    sound = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )
    if not sound or not 0 < len(messages) <= MAX_MESSAGES:
        raise UsageError(
            f'{record.place}: messages are a list of 1 to {MAX_MESSAGES} objects with "role" and "content"; correct it'
        )
    found: list[Message] = messages
    return found


def _tools(record: DataRecord) -> list[Any]:
    tools = record.fields.get("tools") or []
    if not isinstance(tools, list):
        raise UsageError(f'{record.place}: its "tools" are not a list of JSON schemas; correct it')
    return tools
