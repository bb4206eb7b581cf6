"""Parts of a flat vector: who adds up which, how they are encoded, and the sum that counts.

The members of a group, in a fixed order, each own a share, in parts small enough to travel one by one. Everybody
encodes its values of a part for the part's owner, who adds them up in the order of the members and encodes the sum once; all
decode the same bytes, the owner too. So replicas hold identical numbers whatever the codec loses.

Where members are in clusters, values cross from one to another but once: in each, one member gathers those of its own for the
part's owner, and hands the sum back. Owners and gatherers take turns from part to part, so that all paths are used alike.

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
LARGEST_PART = 1 << 18  # elements: 1 MiB as they are, so that what is on the way between two replicas stays small
PARTS_AT_ONCE = 1 << 21  # elements that an owner holds at least of all contributors together, to add up one part
LEAST_PART = 1 << 12  # elements, where members are in clusters and so take turns
TURNS = 2  # of each owner with each gatherer, at least, where the vector is long enough
OWNERS_STEP, GATHERERS_STEP = 0xC13FA9A9, 0x91E10DA5  # of 2**32, from part to part: pairs are met evenly (R2 sequence)
SMALLEST_WEIGHT = 1e-12  # where nobody sent, zero is divided by this

Encoded = tuple[TensorInfo, Buffer]


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


class Contribution(NamedTuple):
    """What one member sent of a part. `weight`: its share of the step's samples; all members' add up to 1."""

    weight: float
    values_N: Tensor  # float32, scaled so that a plain sum over the members is the result
    sent_N: Tensor | None = None  # bool; None: all of it was sent


class Forms(NamedTuple):
    """What a member's values travel as, and the `codecs` of all members of its group, where that follows from lines."""

    codec: Codec
    keep: float
    codecs: frozenset[Codec]


class VectorPart(NamedTuple):
    """Elements `place` of the vector, which the member of number `owner` adds up. `gatherers`: of each cluster the one who adds up
    what comes from there, by cluster; of the owner's it is the owner."""

    owner: int
    place: slice
    gatherers: Mapping[int, int]

    @property
    def length(self) -> int:
        """How many elements."""
        return int(self.place.stop - self.place.start)


def cut(length: int, shares: Sequence[int], clusters: Sequence[int] = ()) -> list[VectorPart]:
    """[0, length) in parts, whose bounds are aligned; members add up as much as their shares are beside one another.

    Of one cluster each member has one stretch. Where there are several, `clusters` names that of each member.
    """
    if len(set(clusters)) > 1:
        return _cut_in_turns(length, shares, clusters)
    longest, total, cluster = longest_part(len(shares)), sum(shares), next(iter(clusters), 0)
    ends = [-(-length * reached // total) for reached in accumulate(shares)]
    bounds = [0, *(min(length, _aligned(end)) for end in ends)]
    return [
        VectorPart(owner, slice(start, min(start + longest, end)), {cluster: owner})
        for owner, (begin, end) in enumerate(pairwise(bounds))
        for start in range(begin, end, longest)
    ]


def _cut_in_turns(length: int, shares: Sequence[int], clusters: Sequence[int]) -> list[VectorPart]:
    """Parts of one length, but for the last, whose owners and gatherers follow low-discrepancy sequences."""
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


def _whose_turn(point: int, members: Sequence[int], shares: Sequence[int]) -> int:
    """In whose share of a circle of 2**32 the point lies."""
    ends = list(accumulate(shares[member] for member in members))
    return members[bisect_right(ends, (point % 2**32) * ends[-1] >> 32)]


def _aligned(bound: int) -> int:
    return bound + -bound % ALIGNMENT


def longest_part(members: int) -> int:
    """Elements of a part: a power of two, smaller where many contribute."""
    return min(LARGEST_PART, 1 << ((PARTS_AT_ONCE // members).bit_length() - 1))


def longest_part_in_turns(length: int, sizes: Sequence[int]) -> int:
    """Of a vector of so many elements, whose contributors are in clusters of these sizes: a power of two, too."""
    meetings = TURNS * sum(sizes) * max(sizes)
    return min(longest_part(sum(sizes)), max(LEAST_PART, 1 << (length // meetings).bit_length() >> 1))


def share_of_nonzeros(part_N: Tensor) -> float:
    """The share that top-k has to keep so that nothing is lost."""
    return int(torch.count_nonzero(part_N)) / max(1, len(part_N))


def contribution(weight: float, values_N: Tensor, codec: Codec) -> Contribution:
    """What was decoded, as a contribution. Top-k: a zero is taken for an element that was not sent, and the mean of
    those that sent it stands for all. Not so of TOPK2: SparseLoCo takes the mean over all members."""
    return Contribution(weight, values_N, values_N != 0 if codec == Codec.TOPK else None)


def reduce_part(received: Sequence[Contribution]) -> Tensor:
    """The sum_N of the contributions, in their order.

    Where only some sent an element, the sum is divided by their share of the weight: the mean of those that sent it
    stands for all. Where nobody did, it is 0.
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
