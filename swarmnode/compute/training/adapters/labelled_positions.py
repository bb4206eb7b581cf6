"""Positions of a microbatch that have a label: only for these are logits computed, some at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from swarmnode.data.rows import NO_LABEL


def count_labels(labels_BS: Tensor, prompt_positions: int) -> int:
    """Return the number of labels that some position predicts: a row's first token has one only behind a soft prompt."""
    return len(LabelledPositions.of(labels_BS, labels_BS.shape[1] + prompt_positions))


@dataclass(frozen=True)
class LabelledPositions:
    """Positions of a microbatch whose next token has a label: their places_N among all positions B * T, and these labels_N."""

    places_N: Tensor
    labels_N: Tensor

    @classmethod
    def of(cls, labels_BS: Tensor, length: int) -> LabelledPositions:
        """Return the positions, in rows of `length` positions that end with the S tokens of `labels_BS`."""
        labels_BT = functional.pad(labels_BS, (length - labels_BS.shape[1], 0), value=NO_LABEL)
        next_N = functional.pad(labels_BT[:, 1:], (0, 1), value=NO_LABEL).flatten()
        places_N = (next_N != NO_LABEL).nonzero().squeeze(1)
        return cls(places_N, next_N[places_N])

    def __len__(self) -> int:
        return len(self.places_N)

    def split(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield places and labels, at most `count` at a time."""
        yield from zip(self.places_N.split(count), self.labels_N.split(count), strict=True)
