"""Text for training, read from files: every document as tokens, one after another with a separator between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from swarmnode.compute.training.datasets.batches import TokenBatches
from swarmnode.data.records import DataRecord, holds_records, read_records
from swarmnode.data.samples import is_text_of_records, visible_files
from swarmnode.errors import UsageError

TEXT_SUFFIXES = frozenset({".txt", ".py", ".md", ".rst", ".jsonl"})
BYTE_SEPARATOR = 0  # text has no byte of this value
BYTE_VOCABULARY = 256

Encode = Callable[[str], list[int]]


def token_batches(
    path: Path,
    vocabulary: int,
    encode: Encode | None = None,
    separator: int | None = None,
    begin: int | None = None,
) -> TokenBatches:
    """Read the text in a file or folder, for a model with a vocabulary of that size; see `read_corpus`.

    Raises UsageError if there is no text, or it has tokens that the model does not know.
    """
    if encode is None and vocabulary < BYTE_VOCABULARY:
        raise UsageError(
            f"vocabulary mismatch: the swarm has no tokenizer, so each byte of the text is a token, and the model knows "
            f"{vocabulary} tokens, not {BYTE_VOCABULARY}"
        )
    return TokenBatches(read_corpus(path, encode, separator, begin), vocabulary)


def read_corpus(
    path: Path, encode: Encode | None = None, separator: int | None = None, begin: int | None = None
) -> np.ndarray:
    """Read all documents of a file, or of a folder's text files in the order of their names, as tokens (uint32_N).

    `begin`, if it is not None, precedes each document, and a separator follows it. Without `encode` each byte of the UTF-8 text is
    a token. Raises UsageError, which names the file, if one is empty or no text.
    """
    documents: list[np.ndarray] = []
    for document in _documents(path):
        if encode is None:
            tokens = np.frombuffer(document.encode(), dtype=np.uint8).astype(np.uint32)
        else:
            tokens = np.asarray(encode(document), dtype=np.uint32)
        first = () if begin is None else (np.asarray([begin], dtype=np.uint32),)
        documents += [*first, tokens, np.asarray([BYTE_SEPARATOR if separator is None else separator], dtype=np.uint32)]
    if not documents:
        raise UsageError(f"{path} is empty: there is no text to train on; give a file with text")
    return np.concatenate(documents)


def _documents(path: Path) -> Iterator[str]:
    for file in [path] if holds_records(path) else _files(path):
        if holds_records(file):
            yield from map(_text_of, read_records(file))
        elif text := _read(file):
            yield text


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"{path}: no such file or folder; check its name")
    visible = set(visible_files(path))
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and (file.suffix in TEXT_SUFFIXES or (file in visible and is_text_of_records(file)))
    )
    if not files:
        raise UsageError(f"{path} has no text files ({', '.join(sorted(TEXT_SUFFIXES))}); add one")
    return files


def passed_over(path: Path) -> list[str]:
    """Return the names of the files in a folder of text that `read_corpus` passes over; empty for a single file."""
    if not path.is_dir() or holds_records(path):
        return []
    read = set(_files(path))
    return [str(file.relative_to(path)) for file in visible_files(path) if file not in read]


def _read(file: Path) -> str:
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}; check its permissions") from None
    if b"\0" in raw:
        raise UsageError(f"{file} is not text: it holds zero bytes; leave it out")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file} is not UTF-8 text: byte {error.start} does not fit; convert the file to UTF-8"
        ) from None


def _text_of(record: DataRecord) -> str:
    """Return the "text" of a record. Raises UsageError if it has none."""
    if "text" not in record.fields:
        raise UsageError(f'{record.place}: not a JSON object with a "text"; correct the record')
    text = record.fields["text"]
    if not isinstance(text, str):
        raise UsageError(f'{record.place}: its "text" is not text; write a string there')
    return text
