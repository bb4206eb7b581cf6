"""Batches: the content of a microbatch, as a pure function of (data, run, step, number).

Samples are drawn without replacement: each epoch is a shuffle of its own of all samples. Two trainers with the same data
and the same run feed the same microbatches, and so does a trainer that joins later.

Batches with held-out data: some microbatches of a step are of samples that the model is not trained on.

Batches of samples with labels of their own: conversations, pairs and documents, padded or packed into rows.

Text for training, read from files: every document as tokens, one after another with a separator between them.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from swarmnode.compute.training.segment import Values
from swarmnode.data.records import DataRecord, holds_records, read_records
from swarmnode.data.rows import NO_LABEL, Rows
from swarmnode.data.samples import DataSummary, is_text_of_records, visible_files
from swarmnode.errors import UsageError
from swarmnode.swarm.records.run import Run

ROUNDS = 4

LabelShares = Callable[[Sequence[Mapping[str, Tensor]]], list[float]]
"""Function from the rows (by array name) of each microbatch of a step to the factors of their means over labels"""


class Permutation:
    """Permutation of the numbers 0 to count - 1, fixed by `key`."""

    def __init__(self, count: int, key: bytes) -> None:
        if count < 1:
            raise ValueError("a permutation needs at least one number")
        self.count = count
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._keys = [hashlib.blake2b(key, salt=bytes([number]), digest_size=16).digest() for number in range(ROUNDS)]

    def __call__(self, number: int) -> int:
        """Return the image of `number`. Raises ValueError if it is out of range."""
        if not 0 <= number < self.count:
            raise ValueError(f"{number} is not below {self.count}")
        while True:  # at most some four rounds: the domain is less than four times as large
            left, right = number >> self._half, number & self._mask
            for key in self._keys:
                digest = hashlib.blake2b(right.to_bytes(8, "little"), key=key, digest_size=8).digest()
                left, right = right, left ^ int.from_bytes(digest, "little") & self._mask
            number = left << self._half | right
            if number < self.count:
                return number


class Microbatch(NamedTuple):
    """Samples of a microbatch: the values at the model's first boundary, and the inputs that the model's last layer takes."""

    inputs: Values
    labels: Values


class Batches(ABC):
    """Data of a training, cut into microbatches. `fingerprint` is 32 bytes that name the data: equal data, equal fingerprint.
    `notes` go into the summary."""

    fingerprint: bytes
    notes: tuple[str, ...] = ()

    @abstractmethod
    def samples(self, run: Run) -> int:
        """Return the number of different samples."""

    def summary(self, run: Run) -> DataSummary:
        """Return the numbers of samples and tokens, and how often the run's steps pass them."""
        samples = self.samples(run)
        tokens = samples * run.sequence
        return DataSummary(samples, tokens, samples, 0, run.steps * run.batch / samples, notes=self.notes)

    def tokens(self, step: int, run: Run) -> int:
        """Return the number of tokens that `step` trains on, without padding; of samples if the model has no tokens."""
        return run.batch * max(1, run.sequence)

    @abstractmethod
    def rows(self, numbers: list[int], run: Run) -> Microbatch:
        """Return the samples with these `numbers` as one microbatch."""

    def microbatch(self, step: int, number: int, run: Run) -> Microbatch:
        """Return microbatch `number` of step `step`."""
        return self.rows(self._numbers(step, number, run), run)

    def split(self, share: float, run: Run) -> tuple[Batches, Batches]:
        """Return the first samples, and the last ones, which are that `share` of all. Raises UsageError if the samples have no
        tokens, or there are too few."""
        raise UsageError("held-out data are for language models that are split at their layers: leave out --eval-every")

    def in_order(self, number: int, run: Run) -> Microbatch:
        """Return microbatch `number` of the rows in their own order, for held-out data. Raises UsageError if the samples have no
        tokens."""
        raise UsageError("held-out data are for language models that are split at their layers: leave out --eval-every")

    def _numbers(self, step: int, number: int, run: Run) -> list[int]:
        """Return the numbers of the samples in microbatch `number` of `step`, in an order shuffled by the run's seed."""
        samples = self.samples(run)
        first = step * run.batch + number * run.microbatch
        return [_drawn(first + row, samples, run.seed) for row in range(run.microbatch)]


def _drawn(place: int, samples: int, seed: int) -> int:
    """Return the sample at a place of the endless sequence of shuffled epochs."""
    epoch, position = divmod(place, samples)
    return Permutation(samples, f"{seed} {epoch}".encode())(position)


def check_vocabulary(tokens: np.ndarray, vocabulary: int) -> None:
    """Raise UsageError if a token is outside of a model's vocabulary of that size."""
    if tokens.size and (highest := int(tokens.max())) >= vocabulary:
        raise UsageError(
            f"vocabulary mismatch: the data has token {highest}, the model knows {vocabulary} (0 to {vocabulary - 1}); "
            "use the tokenizer that belongs to the model"
        )


class TokenBatches(Batches):
    """Batches of windows of `run.sequence` tokens out of one long row. Inputs and labels are both (ids_BT int64,)."""

    def __init__(self, tokens_N: np.ndarray, vocabulary: int) -> None:
        """Take the tokens; `vocabulary` is the model's. Raises UsageError if a token is outside of it."""
        check_vocabulary(tokens_N, vocabulary)
        self._tokens_N, self._vocabulary = tokens_N, vocabulary
        digest = hashlib.sha256(f"tokens {len(tokens_N)}\n".encode())
        digest.update(np.ascontiguousarray(tokens_N, dtype="<u4").data)
        self.fingerprint = digest.digest()

    def samples(self, run: Run) -> int:
        """Return the number of windows that do not overlap. Raises UsageError if the data is shorter than one."""
        return self._count(run.sequence)

    def windows(self, length: int) -> np.ndarray:
        """Return all windows of `length` tokens, ids_NT (int64). Raises UsageError if the data is shorter than one."""
        count = self._count(length)
        return self._tokens_N[: count * length].astype(np.int64).reshape(count, length)

    def _count(self, length: int) -> int:
        count = len(self._tokens_N) // max(1, length)
        if length < 2 or count == 0:
            raise UsageError(
                f"the data has {len(self._tokens_N)} tokens, which is less than one sample of {length}; "
                "give more data or a shorter --sequence of at least 2"
            )
        return count

    def split(self, share: float, run: Run) -> tuple[TokenBatches, TokenBatches]:
        """Return the first windows, and the last ones, which are that `share` of all. Raises UsageError if there are too few."""
        count = self.samples(run)
        if count < 2:
            raise UsageError("the data fill one sample, so none can be held out; give more data or --eval-data")
        cut = run.sequence * min(count - 1, max(1, round(count * (1 - share))))
        held_N = self._tokens_N[cut : count * run.sequence]
        return TokenBatches(self._tokens_N[:cut], self._vocabulary), TokenBatches(held_N, self._vocabulary)

    def in_order(self, number: int, run: Run) -> Microbatch:
        """Return microbatch `number` of the windows in their own order."""
        return self.rows([*range(number * run.microbatch, (number + 1) * run.microbatch)], run)

    def rows(self, numbers: list[int], run: Run) -> Microbatch:
        """Return the samples with these `numbers`, windows of `run.sequence` tokens, as one microbatch. The tokens are also the
        labels."""
        length = run.sequence
        ids_BT = np.stack([self._tokens_N[number * length : (number + 1) * length] for number in numbers])
        values = (torch.from_numpy(ids_BT.astype(np.int64)),)
        return Microbatch(values, values)


class WeighedBatches(Batches):
    """Batches of samples that may have more labels that count than others: in a run that weighs labels, the last label of a
    microbatch is its shares of the means over the step's labels."""

    def __init__(self) -> None:
        self._shared: tuple[tuple[Run, int] | None, Tensor] = (None, torch.empty(0))  # of a step's microbatches

    @abstractmethod
    def _shares(self, numbers_MB: list[list[int]]) -> Tensor:
        """Return the float32 shares of microbatches with these samples: a row for each microbatch, a column for each mean."""

    def microbatch(self, step: int, number: int, run: Run) -> Microbatch:
        """Return microbatch `number` of step `step`. In a run that weighs by labels, the last label is the microbatch's shares of
        the means."""
        made = super().microbatch(step, number, run)
        if not run.weighs_labels:
            return made
        if self._shared[0] != (run, step):
            numbers_MB = [self._numbers(step, one, run) for one in range(run.microbatches)]
            self._shared = (run, step), self._shares(numbers_MB)
        return made._replace(labels=(*made.labels, self._shared[1][number].clone()))


class ArrayBatches(WeighedBatches):
    """Rows of named arrays of equal length. `labels`: names of the arrays that the model's last layer takes; `inputs`: names of
    those that other layers take, all arrays if empty. Both are in the order of the model's inputs."""

    def __init__(
        self, arrays: Mapping[str, np.ndarray], inputs: Sequence[str] = (), labels: Sequence[str] = ()
    ) -> None:
        """Take the arrays. Raises UsageError if there are none, one is empty, or their lengths differ."""
        super().__init__()
        lengths = {name: len(array) for name, array in arrays.items()}
        if not lengths or not all(lengths.values()):
            raise UsageError("the data is empty: there is no sample in it; give data with samples")
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise UsageError(f"the arrays of the data differ in length: {told}; each row must be one sample")
        self._arrays = dict(arrays)
        self._inputs, self._labels = tuple(inputs or self._arrays), tuple(labels)
        self._label_shares: Sequence[LabelShares] = ()
        digest = hashlib.sha256()
        for name, array in self._arrays.items():
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
        self.fingerprint = digest.digest()

    def samples(self, run: Run) -> int:
        return len(next(iter(self._arrays.values())))

    def rows(self, numbers: list[int], run: Run) -> Microbatch:
        values = self._rows(numbers)
        return Microbatch(*(tuple(values[name] for name in names) for names in (self._inputs, self._labels)))

    def weigh(self, label_shares: Sequence[LabelShares]) -> None:
        """Weigh microbatches by their labels in each mean of the loss. If `label_shares` is empty, weigh none."""
        self._label_shares = label_shares

    @property
    def weighs_labels(self) -> bool:
        """Whether some samples may have more labels that count than others."""
        return bool(self._label_shares)

    def _shares(self, numbers_MB: list[list[int]]) -> Tensor:
        rows = [self._rows(numbers) for numbers in numbers_MB]
        return torch.tensor([*zip(*(share(rows) for share in self._label_shares), strict=True)])

    def _rows(self, numbers: list[int]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array[numbers]) for name, array in self._arrays.items()}


class WithHeldOut(Batches):
    """Batches of `trained` data, whose numbers from `run.microbatches` on are of the data `held_out`, the same in each step."""

    def __init__(self, trained: Batches, held_out: Batches) -> None:
        self._trained, self._held_out = trained, held_out
        self.fingerprint = hashlib.sha256(b"held out" + trained.fingerprint + held_out.fingerprint).digest()

    def __repr__(self) -> str:
        return f"WithHeldOut({self._trained!r}, {self._held_out!r})"

    def samples(self, run: Run) -> int:
        return self._trained.samples(run)

    def summary(self, run: Run) -> DataSummary:
        """Return the numbers of the data that are trained on."""
        return self._trained.summary(run)

    def tokens(self, step: int, run: Run) -> int:
        """Return the number of tokens that a step trains on; held-out ones do not count."""
        return self._trained.tokens(step, run)

    def rows(self, numbers: list[int], run: Run) -> Microbatch:
        return self._trained.rows(numbers, run)

    def microbatch(self, step: int, number: int, run: Run) -> Microbatch:
        """Return microbatch `number` of step `step`. A held-out one holds the next rows in the order of the file."""
        if number < run.microbatches:
            return self._trained.microbatch(step, number, run)
        return self._held_out.in_order(number - run.microbatches, run)


class SampleBatches(WeighedBatches):
    """Batches of rows. Inputs are (ids_BT int64,), of packed rows also positions_BT int64; labels are labels_BT int64 and the
    microbatch's share of the step's labels."""

    def __init__(self, rows: Rows, vocabulary: int) -> None:
        """Take the rows; `vocabulary` is the model's. Raises UsageError if a token is outside of it."""
        super().__init__()
        check_vocabulary(rows.ids_NT, vocabulary)
        self.content, self._vocabulary = rows, vocabulary
        self.fingerprint = rows.fingerprint
        self._labels_N = (rows.labels_NT != NO_LABEL).sum(axis=1)

    def samples(self, run: Run) -> int:
        """Return the number of rows."""
        return len(self._labels_N)

    def summary(self, run: Run) -> DataSummary:
        """Return the numbers of samples and tokens, and how often the run's steps pass them."""
        content = self.content
        epochs = run.steps * run.batch / self.samples(run)
        rows = self.samples(run)
        return DataSummary(content.samples, content.tokens, rows, content.cut, epochs, content.left_out, self.notes)

    def tokens(self, step: int, run: Run) -> int:
        """Return the number of tokens in the rows of a step, without padding."""
        numbers = [number for one in range(run.microbatches) for number in self._numbers(step, one, run)]
        return int(self.content.held_N2[numbers, 1].sum())

    def split(self, share: float, run: Run) -> tuple[SampleBatches, SampleBatches]:
        """Return the first rows, and the last ones, which are that `share` of all. Raises UsageError if there are too few."""
        trained, held_out = self.content.split(share)
        return SampleBatches(trained, self._vocabulary), SampleBatches(held_out, self._vocabulary)

    def rows(self, numbers: list[int], run: Run) -> Microbatch:
        """Return the rows with these `numbers` as one microbatch, its labels without a share."""
        content = self.content
        given = [_tensor(content.ids_NT, numbers)]
        if content.is_packed:
            given.append(_tensor(content.positions_NT, numbers))
            if run.known_recipe.watches_routers:  # routers do not learn from padding: each position of it is 0
                given[1] *= torch.arange(run.sequence) < torch.from_numpy(content.held_N2[numbers, 1:])
        return Microbatch(tuple(given), (_tensor(content.labels_NT, numbers),))

    def in_order(self, number: int, run: Run) -> Microbatch:
        """Return microbatch `number` of the rows in their own order, with its share of the labels of all held-out microbatches."""
        size = run.microbatch
        numbers_MB = [[*range(one * size, (one + 1) * size)] for one in range(run.evaluations_at(run.steps))]
        made = self.rows(numbers_MB[number], run)
        return made._replace(labels=(*made.labels, self._shares(numbers_MB)[number]))

    def _shares(self, numbers_MB: list[list[int]]) -> Tensor:
        """Return the labels of each microbatch over the mean of all."""
        counts_M = self._labels_N[numbers_MB].sum(axis=1)
        return torch.tensor(counts_M / counts_M.mean(), dtype=torch.float32).unsqueeze(1)


def _tensor(values_NT: np.ndarray, numbers: list[int]) -> Tensor:
    return torch.from_numpy(values_NT[numbers].astype(np.int64))


TEXT_SUFFIXES = frozenset({".txt", ".py", ".md", ".rst", ".jsonl"})
BYTE_SEPARATOR = 0  # text has no byte of this value
BYTE_VOCABULARY = 256

Encode = Callable[[str], list[int]]


def token_batches(
    path: Path, vocabulary: int, encode: Encode | None = None, separator: int | None = None, begin: int | None = None
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
