"""FlatVector: several tensors as one vector, read and written in chunks without a copy of the whole.

Shape letters: N elements of the vector, M elements of one chunk of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor


def by_block(vectors: Mapping[tuple[int, ...], Tensor], sizes: Callable[[int], int]) -> dict[int, Tensor]:
    """The parts of flat vectors_N, each of so many blocks. Raises ValueError where one is not as long as its blocks together."""
    return {
        block: part
        for blocks, flat_N in vectors.items()
        for block, part in zip(blocks, split(flat_N, [sizes(block) for block in blocks]), strict=True)
    }


def split(flat_N: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """The parts of a flat vector. Raises ValueError where it is not as long as they are together."""
    if flat_N.dim() != 1 or len(flat_N) != sum(sizes):
        raise ValueError(
            f"a flat gradient of shape {tuple(flat_N.shape)} for {sum(sizes)} elements of {len(sizes)} blocks"
        )
    return torch.split(flat_N, list(sizes))


class FlatVector:
    """Contiguous tensors strung together, of one dtype on one device, each in row-major order. It shares their memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach().view(-1) for tensor in tensors]
        self._starts = [0, *accumulate(len(tensor) for tensor in self._tensors)]

    def __repr__(self) -> str:
        return f"FlatVector({len(self)} elements in {len(self._tensors)} tensors)"

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def device(self) -> torch.device:
        """Where all of them are."""
        return self._tensors[0].device if self._tensors else torch.device("cpu")

    def read(self, place: slice) -> Tensor:
        """The elements `place`, as 1-D values_M: a view where they are of one tensor, else a copy."""
        views = list(self._views(place))
        return views[0] if len(views) == 1 else torch.cat([self._nothing(), *views])

    def write(self, place: slice, values_M: Tensor) -> None:
        """Overwrite the elements `place`. Raises ValueError where there are more or fewer of them."""
        views = list(self._views(place))
        if sum(map(len, views)) != len(values_M):
            raise ValueError(f"{len(values_M)} values for elements {place.start} to {place.stop} of {self!r}")
        for view, values in zip(views, torch.split(values_M, [len(view) for view in views]), strict=True):
            view.copy_(values)

    def copy(self) -> Tensor:
        """All of it, in memory of its own."""
        return torch.cat([self._nothing(), *self._tensors])

    def split(self, sizes: Sequence[int]) -> list[Tensor]:
        """1-D views of so many elements each. Raises ValueError where they are not all of it, or one is not of one tensor."""
        if sum(sizes) != len(self):
            raise ValueError(f"{self!r} in pieces of {sum(sizes)} elements")
        places = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        views = [list(self._views(place)) for place in places]
        if any(len(found) > 1 for found in views):
            raise ValueError(f"{self!r} in pieces that cross from one tensor into the next")
        return [found[0] if found else self._nothing() for found in views]

    def _nothing(self) -> Tensor:
        return torch.empty(0, device=self.device)

    def _views(self, place: slice) -> Iterator[Tensor]:
        """What of each tensor is in `place`, which has whole bounds."""
        number = max(0, bisect_right(self._starts, place.start) - 1)
        while number < len(self._tensors) and self._starts[number] < place.stop:
            start = self._starts[number]
            view = self._tensors[number][max(0, place.start - start) : place.stop - start]
            if len(view):
                yield view
            number += 1
