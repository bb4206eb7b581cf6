"""Samples: the tokens of one document or conversation, with labels for the tokens that the model is to learn.

Labels follow from the record's kind (see `data/formats.py`): of a conversation the assistant's answers, of a pair the completion,
of a text every token.

Rules that turn data into samples, beside the settings of a run: tokens that count, packing, epochs, held-out data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from swarmnode.counting import common_beginning, counted
from swarmnode.data.conversation import ASSISTANT, GREETING, REASONING, ChatEnding, ChatRenderer, Mappings
from swarmnode.data.formats import TEXT, Kind, RecordConversation, RecordPair, kind_of, read_fields
from swarmnode.data.records import DataRecord, holds_records, read_records
from swarmnode.errors import CheckpointError, UsageError

ARRAYS_SUFFIX = ".npz"
SHOWN_CHARS = 2000
ARRAYS: Kind = frozenset({"input_ids"})


class LearntTokens(Enum):
    """Tokens that count in the loss of conversations and pairs."""

    ANSWERS = "answers"
    ALL = "all"


class SampleTokenizer(Protocol):
    """Interface to a tokenizer that samples are made with (`client/tokenizer.py`)."""

    @property
    def separator(self) -> int | None:
        """Token that ends a text; None if the model has none."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""

    @property
    def renderer(self) -> ChatRenderer:
        """Renderer of conversations by the chat template."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special tokens that the model expects around it."""

    def marked_answers(
        self, messages: Mappings, tools: Mappings, variables: Mapping[str, Any]
    ) -> tuple[list[int], list[bool]] | None:
        """Return the tokens of a conversation, and which of them the template marks as the assistant's; None if it marks none."""


class TokenSample(NamedTuple):
    """TokenSample of N tokens; `counts` says for each token whether it is a label that counts."""

    tokens: list[int]
    counts: list[bool]


@dataclass
class DataNotes:
    """Notes on data while it is read: names of `passed_over` fields and files without a meaning here, and whether a label
    `teaches_end`: it is a token that ends an answer."""

    passed_over: set[str] = field(default_factory=set)
    teaches_end: bool = False


def read_samples(
    path: Path, tokenizer: SampleTokenizer, loss: LearntTokens = LearntTokens.ANSWERS, notes: DataNotes | None = None
) -> Iterator[TokenSample]:
    """Yield the samples of a file of records, in order; a record of several answers may give several.

    Raises UsageError, naming the file and the line, for a record that gives no sample, or is of another kind than the first one.
    """
    first: Kind | None = None
    notes = DataNotes() if notes is None else notes
    for record in _records(path, notes):
        kind = sample_kind_of(record)
        first = kind if first is None else first
        if kind != first:
            raise UsageError(
                f"{record.place}: has {_named(kind)}, but the first record has {_named(first)}; use one kind"
            )
        try:
            told = read_fields(record.fields, kind, notes.passed_over)
            samples = (
                conversation(told, tokenizer, loss)
                if isinstance(told, RecordConversation)
                else [_plain(told, tokenizer, loss)]
            )
        except (CheckpointError, UsageError) as error:
            raise UsageError(f"{record.place}: {error}") from None
        if not any(any(sample.counts[1:]) for sample in samples):
            raise UsageError(
                f"{record.place}: no token in it counts as a label; leave the record out, or give --loss all"
            )
        yield from samples


def sample_kind_of(record: DataRecord) -> Kind:
    """Return the names of the fields that make a record a sample. Raises UsageError, with its place, if it is of no known kind."""
    try:
        return kind_of(record.fields)
    except UsageError as error:
        raise UsageError(f"{record.place}: {error}") from None


def sample_kind(path: Path) -> Kind:
    """Return the names of the fields that make the first record of a file a sample; TEXT for files and folders of plain text.

    A folder with text and files of samples is one of samples. Raises UsageError if there is no record.
    """
    if path.suffix == ARRAYS_SUFFIX:
        return ARRAYS
    if not holds_records(path):
        kinds = (_kind_in(file) for file in visible_files(path)) if path.is_dir() else ()
        return next((kind for kind in kinds if kind not in (None, TEXT)), TEXT) or TEXT
    for record in read_records(path):
        return sample_kind_of(record)
    raise UsageError(f"{path} is empty: there is no record in it; give a file with records")


def visible_files(folder: Path) -> list[Path]:
    """Return the files in a folder and its folders, in the order of their names, without hidden ones."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return sorted(file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts))


def _kind_in(file: Path) -> Kind | None:
    """Return the kind of the first record of a file; None for a file without records, and for a JSON file of something else."""
    if not holds_records(file):
        return None
    try:
        return next(map(sample_kind_of, read_records(file)), None)
    except UsageError:
        if file.suffix == ".json":
            return None
        raise


def is_text_of_records(file: Path) -> bool:
    """Return whether a file holds records of plain text."""
    return _kind_in(file) == TEXT


def _records(path: Path, notes: DataNotes) -> Iterator[DataRecord]:
    """Yield the records of a file, or of all such files of a folder; note the others."""
    if holds_records(path) or not path.is_dir():
        yield from read_records(path)
        return
    for file in visible_files(path):
        if _kind_in(file) is None:
            notes.passed_over.add(str(file.relative_to(path)))
        else:
            yield from read_records(file)


def with_ends(
    samples: Iterable[TokenSample], stops: Iterable[int], end: int | None, notes: DataNotes
) -> Iterator[TokenSample]:
    """Yield samples of conversations, and note whether a label is one of `stops`.

    With `end`, a stop token behind an answer counts, too; if none is in or behind the last answer, `end` is put there.
    """
    ending = set(stops)
    for tokens, counts in samples:
        if end is not None:
            pairs = zip(tokens[1:], counts, strict=False)  # a token, and whether the one before counts
            counts = [
                *counts[:1],
                *(does or (told and token in ending) for does, (token, told) in zip(counts[1:], pairs, strict=True)),
            ]
            # the last answer begins
            last = next((place for place in range(len(counts), 0, -1) if not counts[place - 1]), 0)
            if last < len(tokens) and not ending.intersection(tokens[last:]):
                tokens, counts = [*tokens, end], [*counts, True]
        notes.teaches_end |= any(does and token in ending for token, does in zip(tokens, counts, strict=True))
        yield TokenSample(tokens, counts)


def shown(sample: TokenSample, decode: Callable[[Sequence[int]], str], most: int = SHOWN_CHARS) -> str:
    """Return a sample as the model sees it, in one line of at most about `most` characters. What is learnt stands in ⟦ ⟧."""
    told = ""
    for learnt, run in itertools.groupby(zip(*sample, strict=True), key=lambda one: one[1]):
        text = decode([token for token, _ in run])
        told += f"⟦{text}⟧" if learnt else text
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in told)
    return line if len(line) <= most else f"{line[: most // 2]} … {line[-most // 2 :]}"


def _named(kind: Iterable[str]) -> str:
    return " and ".join(sorted(kind))


def conversation(content: RecordConversation, tokenizer: SampleTokenizer, loss: LearntTokens) -> list[TokenSample]:
    """Return the samples of a conversation.

    Answers are found by the template's own marks. Without marks they are the tokens that an answer adds to the conversation
    before it. A template that writes earlier answers in another way than the last one gives a sample
    for each answer, whose loss is on the last answer alone.

    Raises CheckpointError if the template cannot be used, UsageError if it leaves out what is to be learnt.
    """
    if not tokenizer.has_chat_template:
        raise CheckpointError(
            'the model has no chat template, so messages cannot be written; give "prompt" and "completion" as texts'
        )
    renderer = tokenizer.renderer
    answers = [place for place, message in enumerate(content.messages) if message["role"] == ASSISTANT]
    learnt = [place for place in answers if content.counts[place]]
    if any(REASONING in content.messages[place] for place in learnt) and renderer.reasoning_field is None:
        raise UsageError(
            "the chat template shows no reasoning of an answer; write it into the content, or leave the field out"
        )
    whole = renderer.encode(content.messages, content.tools, content.variables, ChatEnding.CLOSED)
    if loss is LearntTokens.ALL:
        if content.prompt_messages is None and learnt != answers:
            raise UsageError("an answer in it does not count, but --loss all makes every token count; choose one")
        return [TokenSample(whole, [True] * len(whole))]
    if content.prompt_messages is not None:
        return [TokenSample(whole, _from(_answer_begins(content, content.prompt_messages, whole, tokenizer), whole))]
    if learnt == answers:
        marked = tokenizer.marked_answers(*renderer.placed(content.messages, content.tools), content.variables)
        if marked is not None:
            return [TokenSample(*marked)]
    apart = [_answer(content, place, tokenizer) for place in learnt]
    if not all(whole[: len(sample.tokens)] == sample.tokens for sample in apart):
        return apart
    counts = [False] * len(whole)
    for sample in apart:
        for place, does in enumerate(sample.counts):
            counts[place] |= does
    return [TokenSample(whole, counts)]


def _answer(content: RecordConversation, place: int, tokenizer: SampleTokenizer) -> TokenSample:
    """Return the sample of the messages up to the answer at `place`, which alone is learnt."""
    until, renderer = content.messages[: place + 1], tokenizer.renderer
    marked = tokenizer.marked_answers(*renderer.placed(until, content.tools), content.variables)
    tokens = (
        renderer.encode(until, content.tools, content.variables, ChatEnding.CLOSED) if marked is None else marked[0]
    )
    after = _from(_answer_begins(content, place, tokens, tokenizer), tokens)
    if marked is not None:
        after = [does and mark for does, mark in zip(after, marked[1], strict=True)]
    return TokenSample(tokens, after)


def _answer_begins(content: RecordConversation, place: int, tokens: Sequence[int], tokenizer: SampleTokenizer) -> int:
    """Return the place in `tokens` at which they leave the prompt that the model gets before the message at `place`.

    A tokenizer may join the last letters of a prompt with the next ones. Before the first message there is no prompt: then it is
    the place behind the first header of an answer.
    """
    renderer = tokenizer.renderer
    if place:
        prompt = renderer.encode(content.messages[:place], content.tools, content.variables, ChatEnding.ANSWER)
        return common_beginning(prompt, tokens)
    closed, begun = (
        renderer.encode([GREETING], content.tools, content.variables, ending)
        for ending in (ChatEnding.CLOSED, ChatEnding.ANSWER)
    )
    header = begun[common_beginning(closed, begun) :]
    found = (at for at in range(len(tokens)) if tokens[at : at + len(header)] == header)
    return next(found, 0) + len(header) if header else 0


def _plain(content: RecordPair | str, tokenizer: SampleTokenizer, loss: LearntTokens) -> TokenSample:
    """Return the sample of a text, all of it learnt, or of a pair, whose completion is learnt; the end of text follows."""
    if isinstance(content, str):
        tokens = _ended(tokenizer.encode(content), tokenizer)
        return TokenSample(tokens, [True] * len(tokens))
    tokens = _ended(tokenizer.encode(content.prompt + content.completion), tokenizer)
    begin = 0 if loss is LearntTokens.ALL else common_beginning(tokenizer.encode(content.prompt), tokens)
    return TokenSample(tokens, _from(begin, tokens))


def _from(begin: int, tokens: Sequence[int]) -> list[bool]:
    return [place >= begin for place in range(len(tokens))]


def _ended(tokens: list[int], tokenizer: SampleTokenizer) -> list[int]:
    """Return the tokens with the token that ends a text at their end, once."""
    end = tokenizer.separator
    return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


@dataclass(frozen=True)
class DataRules:
    """Rules of a training's data.

    `loss`: tokens of conversations and pairs that count. `packs`: several samples share a row if the model can train so. `epochs`:
    passes over the data, which give the number of steps; 0 if the steps are given. `held_out`: data to evaluate on, or
    `held_out_share`: the share of the data's rows that is kept back for it; every `evaluate_every` steps (0: never). `shown`:
    number of samples that are shown at the start. `ends_answers`: the model's stop token is put behind the last answer of a
    conversation if its template writes none.
    """

    loss: LearntTokens = LearntTokens.ANSWERS
    packs: bool = True
    epochs: float = 0.0
    held_out: Path | None = None
    held_out_share: float = 0.0
    evaluate_every: int = 0
    shown: int = 1
    ends_answers: bool = False


@dataclass(frozen=True)
class DataSummary:
    """Summary of the data of a run: its samples, their tokens (0 for arrays), the rows that they fill, the samples that were cut
    to a row's length, and the passes over them in the run's steps. `left_out` counts samples without a label within a row, which
    are not among them. `notes` are sentences about the data, and samples to show."""

    samples: int
    tokens: int
    rows: int
    cut: int
    epochs: float
    left_out: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        packed = f" in {counted(self.rows, 'row')}" if self.rows != self.samples else ""
        cut = f", {self.cut:,} of them cut to --sequence tokens" if self.cut else ""
        tokens = f", {self.tokens:,} tokens" if self.tokens else ""
        gone = f"; {self.left_out:,} left out: no label within --sequence tokens" if self.left_out else ""
        return f"{counted(self.samples, 'sample')}{packed}{cut}{tokens}; {self.epochs:.3g} epochs{gone}"


def check_rules(rules: DataRules) -> None:
    """Raise UsageError if the rules are not valid."""
    if not 0 <= rules.epochs <= 1e6:
        raise UsageError(f"--epochs {rules.epochs:g}: give a number above 0, up to 1,000,000")
    sources = bool(rules.held_out) + bool(rules.held_out_share)
    if sources > 1 or bool(sources) != bool(rules.evaluate_every):
        raise UsageError("to evaluate, give --eval-every and either --eval-data or --eval-share")
    if not 0 <= rules.held_out_share < 1:
        raise UsageError(f"--eval-share {rules.held_out_share:g}: give a share above 0, below 1")


def steps_of(epochs: float, rows: int, batch: int) -> int:
    """Return the fewest steps of `batch` rows that pass all `rows` `epochs` times."""
    return max(1, -int(-epochs * rows // batch))
