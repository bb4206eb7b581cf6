"""Parts of a flat vector: their owners, their encoding, and their sum.

The members of a group, in a fixed order, each own a share, in parts small enough to be sent one by one. Each member encodes its
values of a part for the part's owner, who adds them up in the order of the members and encodes the sum once. All members decode
the same bytes, the owner too. So replicas hold identical numbers whatever the codec loses.

If members are in several clusters, values cross between clusters only once: in each cluster one member gathers its members'
values for the part's owner, and hands the sum back. Owners and gatherers take turns from part to part, so that all paths are
used alike.

Shape letters: N elements of a part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from swarmnode.codec.tensors import Codec, TensorInfo
from swarmnode.compress.codecs import Buffer

ALIGNMENT = 64  # elements: no group of a block-wise codec crosses from one part into the next
LARGEST_PART = 1 << 18  # elements: 1 MiB uncompressed, so that little is in transit between two replicas
PARTS_AT_ONCE = 1 << 21  # elements of all contributors together that an owner holds at least, to add up one part
LEAST_PART = 1 << 12  # elements, if members are in clusters and so take turns
TURNS = 2  # of each owner with each gatherer, at least, if the vector is long enough
OWNERS_STEP, GATHERERS_STEP = 0xC13FA9A9, 0x91E10DA5  # of 2**32, from part to part: pairs occur evenly (R2 sequence)
SMALLEST_WEIGHT = 1e-12  # divisor of the zero sum of elements that no member sent

Encoded = tuple[TensorInfo, Buffer]


def by_block(vectors: Mapping[tuple[int, ...], Tensor], sizes: Callable[[int], int]) -> dict[int, Tensor]:
    """Split flat vectors_N by block; `sizes` gives the length of each block.

    Raises ValueError unless each vector has the length of its blocks together.
    """
    return {
        block: part
        for blocks, flat_N in vectors.items()
        for block, part in zip(blocks, split(flat_N, [sizes(block) for block in blocks]), strict=True)
    }


def split(flat_N: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Split a flat vector into parts of `sizes`. Raises ValueError unless its length is their sum."""
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
        """Device of the tensors; the CPU if there are none."""
        return self._tensors[0].device if self._tensors else torch.device("cpu")

    def read(self, place: slice) -> Tensor:
        """Return the elements `place` as 1-D values_M: a view if they are of one tensor, else a copy."""
        views = list(self._views(place))
        return views[0] if len(views) == 1 else torch.cat([self._nothing(), *views])

    def write(self, place: slice, values_M: Tensor) -> None:
        """Overwrite the elements `place`. Raises ValueError if `values_M` has more or fewer."""
        views = list(self._views(place))
        if sum(map(len, views)) != len(values_M):
            raise ValueError(f"{len(values_M)} values for elements {place.start} to {place.stop} of {self!r}")
        for view, values in zip(views, torch.split(values_M, [len(view) for view in views]), strict=True):
            view.copy_(values)

    def copy(self) -> Tensor:
        """Return a copy of all elements as one tensor."""
        return torch.cat([self._nothing(), *self._tensors])

    def split(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return 1-D views of `sizes` elements each.

        Raises ValueError if they are more or fewer than the vector's, or a view would cross from one tensor into the next.
        """
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
        """Yield the part of each tensor that is in `place`, which must have bounds."""
        number = max(0, bisect_right(self._starts, place.start) - 1)
        while number < len(self._tensors) and self._starts[number] < place.stop:
            start = self._starts[number]
            view = self._tensors[number][max(0, place.start - start) : place.stop - start]
            if len(view):
                yield view
            number += 1


class Contribution(NamedTuple):
    """Contribution of a member to a part. `weight` is its share of the step's samples; all members' add up to 1."""

    weight: float
    values_N: Tensor  # float32, scaled so that a plain sum over the members is the result
    sent_N: Tensor | None = None  # bool mask; None if all elements were sent


class Forms(NamedTuple):
    """Codec of a member's values, the share that top-k keeps, and the `codecs` of all members, if the links decide these."""

    codec: Codec
    topk_share: float
    codecs: frozenset[Codec]


class VectorPart(NamedTuple):
    """Part of the vector: the elements `place`, added up by the member number `owner`.

    `gatherers` holds for each cluster the member that adds up its values; in the owner's cluster it is the owner.
    """

    owner: int
    place: slice
    gatherers: Mapping[int, int]

    @property
    def length(self) -> int:
        """Number of elements."""
        return int(self.place.stop - self.place.start)


def cut(length: int, shares: Sequence[int], clusters: Sequence[int] = ()) -> list[VectorPart]:
    """Cut [0, length) into parts with aligned bounds. Members own as much as their shares, relative to one another.

    `clusters` names the cluster of each member. In one cluster, each member owns one stretch.
    """
    if len(set(clusters)) > 1:
        # Cut a vector of `length` elements into parts of equal length, except the last. Owners and gatherers of the parts
        # follow low-discrepancy sequences, in proportion to `shares`.
        members = {cluster: [i for i, at in enumerate(clusters) if at == cluster] for cluster in sorted(set(clusters))}
        size = longest_part_in_turns(length, [len(inside) for inside in members.values()])
        parts = []
        for number, start in enumerate(range(0, length, size)):
            owner = _whose_turn(number * OWNERS_STEP, range(len(shares)), shares)
            gatherers = {
                cluster: owner if owner in inside else _whose_turn(number * GATHERERS_STEP, inside, shares)
                for cluster, inside in members.items()
            }
            parts.append(VectorPart(owner, slice(start, min(start + size, length)), gatherers))
        return parts
    longest, total, cluster = longest_part(len(shares)), sum(shares), next(iter(clusters), 0)
    ends = [-(-length * reached // total) for reached in accumulate(shares)]
    bounds = [0, *(min(length, (end + -end % ALIGNMENT)) for end in ends)]
    return [
        VectorPart(owner, slice(start, min(start + longest, end)), {cluster: owner})
        for owner, (begin, end) in enumerate(pairwise(bounds))
        for start in range(begin, end, longest)
    ]


def _whose_turn(point: int, members: Sequence[int], shares: Sequence[int]) -> int:
    """Return the member whose share of a circle of 2**32 holds the point."""
    ends = list(accumulate(shares[member] for member in members))
    return members[bisect_right(ends, (point % 2**32) * ends[-1] >> 32)]


def longest_part(members: int) -> int:
    """Return the elements of a part: a power of two, smaller if many members contribute."""
    return min(LARGEST_PART, 1 << ((PARTS_AT_ONCE // members).bit_length() - 1))


def longest_part_in_turns(length: int, sizes: Sequence[int]) -> int:
    """Return the elements of a part if contributors are in clusters of these `sizes`: a power of two, for a vector of `length`."""
    meetings = TURNS * sum(sizes) * max(sizes)
    return min(longest_part(sum(sizes)), max(LEAST_PART, 1 << (length // meetings).bit_length() >> 1))


def share_of_nonzeros(part_N: Tensor) -> float:
    """Return the share of elements that top-k has to keep to lose nothing."""
    return int(torch.count_nonzero(part_N)) / max(1, len(part_N))


def contribution(weight: float, values_N: Tensor, codec: Codec) -> Contribution:
    """Return decoded values as a contribution.

    With top-k, zeros count as elements that were not sent, and the mean of the members that sent one stands for all. Not so with
    TOPK2: SparseLoCo takes the mean over all members.
    """
    return Contribution(weight, values_N, values_N != 0 if codec == Codec.TOPK else None)


def reduce_part(received: Sequence[Contribution]) -> Tensor:
    """Return the sum_N of the contributions, in their order.

    If only some members sent an element, the sum is divided by their share of the weight: their mean stands for all.
    An element that no member sent is 0.
    """
    total_N = received[0].values_N.clone()
    for member in received[1:]:
        total_N += member.values_N
    if all(member.sent_N is None for member in received):
        return total_N
    weights_N = torch.zeros_like(total_N)
    for member in received:
        weights_N += member.weight if member.sent_N is None else member.weight * member.sent_N
    return total_N.div_(weights_N.clamp_min_(SMALLEST_WEIGHT))
