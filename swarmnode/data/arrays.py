"""Samples of token ids in an .npz file: `input_ids_NT`, and `labels_NT` if not every token counts. Nothing is unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from swarmnode.data.rows import NO_LABEL
from swarmnode.data.samples import TokenSample
from swarmnode.errors import UsageError


def read_arrays(path: Path, length: int) -> Iterator[TokenSample]:
    """Yield a sample for each row of `input_ids`, at most `length` tokens of it. Rows end with their last token that is not -100.

    Raises UsageError if the file has no `input_ids`, `labels` have another shape or are other tokens, or it is damaged.
    """
    ids_NT, labels_NT = _arrays(path)
    for number, (ids_T, labels_T) in enumerate(zip(ids_NT, labels_NT, strict=True)):
        held = ids_T >= 0
        size = len(held) - int(held[::-1].argmax()) if held.any() else 0
        counts_T = labels_T[:size] != NO_LABEL
        if not held[:size].all() or (labels_T[:size] != ids_T[:size])[counts_T].any():
            raise UsageError(f"{path}, row {number}: ids or labels are no tokens; labels are the ids, or -100")
        yield TokenSample(ids_T[: min(size, length)].tolist(), counts_T[: min(size, length)].tolist())


def _arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            ids_NT = file["input_ids"]
            labels_NT = file.get("labels", ids_NT)
    except KeyError:
        raise UsageError(f'{path} has no array "input_ids"; write one with numpy.savez') from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}; check the file") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is not a file of plain numpy arrays: {error}; write it with numpy.savez") from None
    if (
        ids_NT.ndim != 2
        or labels_NT.shape != ids_NT.shape
        or not all(one.dtype.kind in "iu" for one in (ids_NT, labels_NT))
    ):
        raise UsageError(f"{path}: give whole numbers, one row a sample, and labels of the same shape as input_ids")
    return ids_NT.astype(np.int64), labels_NT.astype(np.int64)
