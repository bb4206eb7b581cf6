"""Round: one vector that the members of a group sum up part by part, with an account of the losses in what each member sent.

The losses of a codec must not be lost for good (error feedback: Stich et al., arXiv 1809.07599). So each member keeps account of
its *said* values: those that it sent, as decoded, and for the parts that it owns also the loss in encoding the sum. So all said
values add up to the decoded sum. The difference between a member's wanted and said values is its residual, which it adds to its
next vector.

With top-k, the mean of the members that sent an element stands for all, and the sum's elements are all sent. Only the senders
account for an element. Charging the others with the mean, so that accounts add up, was tried and diverges: two members that
disagree then answer each other with ever larger corrections.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from swarmnode.codec.tensors import SPARSE_CODECS, Codec, DType, TensorInfo
from swarmnode.compress.codecs import LARGEST_IN_FP16, Buffer, decode, encode
from swarmnode.compute.training.averaging.parts import (
    Contribution,
    Encoded,
    FlatVector,
    contribution,
    reduce_part,
    share_of_nonzeros,
)
from swarmnode.compute.training.averaging.robust_aggregation import CentredClipping
from swarmnode.compute.training.saved_activations import LARGEST_SUM, is_finite, is_within
from swarmnode.errors import NotFinite, ProtocolError

UNKNOWN_UNIT = -1


@dataclass(repr=False, eq=False)
class Round:
    """View that one member has of a sum.

    A contributor (weight above 0) offers every part to the part's owner, itself included. The owner settles its parts. Every
    member takes all settled parts into `total`, which may share its memory with `local`. Parts are copied whole only to encode
    them.

    `keep` is the share of elements that top-k sends, `codecs` are others' codecs. `residual` is added to the sent values.
    `left_over`, zeros at first, gets the unsent values; None keeps no account. `clipping` adds up an owner's parts robustly; None
    adds plainly. `stretches` are the places of this round's elements in the whole vector, in order; empty if they are all of it.
    """

    local: FlatVector
    total: FlatVector
    weight: float
    codec: Codec
    keep: float = 1.0
    codecs: Collection[Codec] = ()
    residual: FlatVector | None = None
    left_over: FlatVector | None = None
    clipping: CentredClipping | None = None
    stretches: Sequence[slice] = ()

    def __post_init__(self) -> None:
        self.codecs = frozenset({self.codec, *self.codecs})

    def __repr__(self) -> str:
        return f"Round({len(self)} elements, {self.codec.name}, weight {self.weight:.3f})"

    def __len__(self) -> int:
        """Return the number of elements of the vector."""
        return len(self.total)

    def offer(self, part: slice) -> Encoded:
        """Return this member's values of a part, encoded for the part's owner. Raises NotFinite if the codec cannot hold them."""
        wanted_M = self.local.read(part)
        if self.residual is not None:
            wanted_M = wanted_M + self.residual.read(part)
        encoded, said_M = self._encode(wanted_M, self.keep)
        if self.left_over is not None:
            self.left_over.write(part, wanted_M - said_M)
        return encoded

    def hear(self, part: slice, weight: float, info: TensorInfo, payload: Buffer) -> Contribution:
        """Decode the offer of a contributor of this weight.

        Raises ProtocolError if it is not as agreed, or holds NaN or infinity.
        """
        return contribution(weight, self._decode(part, info, payload), self.codec)

    def settle(self, part: slice, contributions: Sequence[Contribution]) -> Encoded:
        """Return the encoded sum of all contributions, which are in the order of the members. For the owner. Raises NotFinite."""
        clipping = self.clipping
        total_M = reduce_part(contributions) if clipping is None else clipping.reduce(part, contributions)
        encoded, said_M = self._encode(total_M, share_of_nonzeros(total_M) if self.codec in SPARSE_CODECS else 1.0)
        if self.left_over is not None and self.codec != Codec.TOPK:
            self.left_over.write(part, self.left_over.read(part) + (total_M - said_M))
        return encoded

    def in_vector(self, part: slice, values_M: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the values of a part by their places in the whole vector."""
        start = 0
        for stretch in self.stretches or [slice(0, len(self))]:
            end = start + stretch.stop - stretch.start
            first, last = max(part.start, start), min(part.stop, end)
            if first < last:
                behind = stretch.start - start
                yield slice(first + behind, last + behind), values_M[first - part.start : last - part.start]
            start = end

    def take(self, part: slice, info: TensorInfo, payload: Buffer) -> None:
        """Write a settled part into `total`. Raises ProtocolError if it is not as agreed, or holds NaN or infinity."""
        self.total.write(part, self._decode(part, info, payload))

    def _encode(self, values_M: Tensor, keep: float) -> tuple[Encoded, Tensor]:
        """Encode values, and return them also as they will be decoded. Those beyond float16's range are cut to it with FP16: the
        owner of a sum is not at fault for what others contribute.

        Raises NotFinite for values that are not finite: other members would take them for a breach of the protocol.
        """
        if self.codec == Codec.FP16 and is_finite([values_M]):
            values_M = values_M.clamp(-LARGEST_IN_FP16, LARGEST_IN_FP16)
        param = round(keep * len(values_M)) if self.codec in SPARSE_CODECS else 0  # top-k sends about this many
        encoded = encode(values_M, self.codec, param=param)
        said_M = values_M if self.codec == Codec.NONE else self._read(len(values_M), *encoded)
        if not is_finite([said_M]):
            raise NotFinite(
                f"a sum holds values that {self.codec.name} "
                "makes NaN or infinite; lower --lr or --clip, or check the data",
                unit=UNKNOWN_UNIT,
            )
        return encoded, said_M

    def _decode(self, part: slice, info: TensorInfo, payload: Buffer) -> Tensor:
        values_M = self._read(part.stop - part.start, info, payload)
        if not is_within([values_M], LARGEST_SUM):
            raise ProtocolError("a part holds NaN, infinity or values that would overflow")
        return values_M

    def _read(self, length: int, info: TensorInfo, payload: Buffer) -> Tensor:
        if info.codec not in self.codecs or (info.dtype, info.shape) != (DType.FLOAT32, (length,)):
            names = " or ".join(sorted(Codec(codec).name for codec in self.codecs))
            raise ProtocolError(f"a part is {info}; agreed are {length} elements of float32 in codec {names}")
        return decode(info, payload, device=self.total.device, max_elements=length)
