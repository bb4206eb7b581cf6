"""Round: one vector that the members of a group sum up, chunk by chunk, and what of their own each could not say.

What a codec loses must not be lost for good (error feedback: Stich et al., arXiv 1809.07599). So each member keeps account of
what it *said*: what it sent, as decoded, and for the parts that it owns also what encoding the sum lost. So what all said
adds up to what everybody decoded. What a member wanted to say and did not is its residual, which it adds to its next vector.

By top-k, the mean of those that sent an element stands for all, and the sum's elements are all sent. An element is on
nobody's account but the senders': to charge the others with the mean, so that accounts add up, was tried and diverges, for
two members that disagree then answer each other with ever larger corrections.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from swarmnode.codec.tensors import SPARSE_CODECS, Codec, DType, TensorInfo
from swarmnode.compress.codecs import Buffer, decode, encode
from swarmnode.compute.training.averaging.parts import (
    Contribution,
    Encoded,
    FlatVector,
    contribution,
    reduce_part,
    share_of_nonzeros,
)
from swarmnode.compute.training.averaging.robust_aggregation import CentredClipping
from swarmnode.compute.training.saved_activations import is_finite
from swarmnode.errors import NotFinite, ProtocolError

UNKNOWN_UNIT = -1


@dataclass(repr=False, eq=False)
class Round:
    """One member's view of a sum. A contributor (weight above 0) offers every part to the part's owner, itself included; the
    owner settles its parts; everybody takes all settled parts into `total`, which may share its memory with `local`.

    `keep`: share of the elements that top-k sends. `codecs`: what others send, besides. `residual`: added to what is said.
    `left_over`, of zeros: where to note what this member did not say; None: nowhere. No part is copied whole but to encode it.
    `clipping`: how an owner adds up; None: plainly. `stretches`: where its elements are in the vector that is agreed on, one after
    another; none: they are all of it.
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
        """Elements of the vector."""
        return len(self.total)

    def offer(self, part: slice) -> Encoded:
        """This member's values of a part, for the part's owner. Raises NotFinite where the codec cannot hold them."""
        wanted_M = self.local.read(part)
        if self.residual is not None:
            wanted_M = wanted_M + self.residual.read(part)
        encoded, said_M = self._encode(wanted_M, self.keep)
        if self.left_over is not None:
            self.left_over.write(part, wanted_M - said_M)
        return encoded

    def hear(self, part: slice, weight: float, info: TensorInfo, payload: Buffer) -> Contribution:
        """What a contributor of this weight offered. Raises ProtocolError where it is not what was agreed, NaN or infinite."""
        return contribution(weight, self._decode(part, info, payload), self.codec)

    def settle(self, part: slice, contributions: Sequence[Contribution]) -> Encoded:
        """The owner's work: the sum of all, which are in the order of the members. Raises NotFinite."""
        clipping = self.clipping
        total_M = reduce_part(contributions) if clipping is None else clipping.reduce(part, contributions)
        encoded, said_M = self._encode(total_M, share_of_nonzeros(total_M) if self.codec in SPARSE_CODECS else 1.0)
        if self.left_over is not None and self.codec != Codec.TOPK:
            self.left_over.write(part, self.left_over.read(part) + (total_M - said_M))
        return encoded

    def in_vector(self, part: slice, values_M: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """What is said of a part, by where it is in the vector that is agreed on."""
        start = 0
        for stretch in self.stretches or [slice(0, len(self))]:
            end = start + stretch.stop - stretch.start
            first, last = max(part.start, start), min(part.stop, end)
            if first < last:
                behind = stretch.start - start
                yield slice(first + behind, last + behind), values_M[first - part.start : last - part.start]
            start = end

    def take(self, part: slice, info: TensorInfo, payload: Buffer) -> None:
        """Write a settled part down. Raises ProtocolError where it is not what was agreed, NaN or infinite."""
        self.total.write(part, self._decode(part, info, payload))

    def _encode(self, values_M: Tensor, keep: float) -> tuple[Encoded, Tensor]:
        """Also as it will be decoded. What is not finite is never sent: others take it for a breach of the protocol."""
        param = round(keep * len(values_M)) if self.codec in SPARSE_CODECS else 0  # top-k sends about this many
        encoded = encode(values_M, self.codec, param=param)
        said_M = values_M if self.codec == Codec.NONE else self._read(len(values_M), *encoded)
        if not is_finite([said_M]):
            raise NotFinite(f"a sum holds values that {self.codec.name} makes NaN or infinite", unit=UNKNOWN_UNIT)
        return encoded, said_M

    def _decode(self, part: slice, info: TensorInfo, payload: Buffer) -> Tensor:
        values_M = self._read(part.stop - part.start, info, payload)
        if not is_finite([values_M]):
            raise ProtocolError("a part holds NaN or infinity")
        return values_M

    def _read(self, length: int, info: TensorInfo, payload: Buffer) -> Tensor:
        if info.codec not in self.codecs or (info.dtype, info.shape) != (DType.FLOAT32, (length,)):
            names = " or ".join(sorted(Codec(codec).name for codec in self.codecs))
            raise ProtocolError(f"a part is {info}; agreed are {length} elements of float32 in codec {names}")
        return decode(info, payload, device=self.total.device, max_elements=length)
