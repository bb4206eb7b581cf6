"""Round: one vector that the members of a group sum up, and how much of the sum each of them has to answer for.

What a codec loses must not be lost for good (error feedback: Stich et al., arXiv 1809.07599). So each member keeps account of
what it *said*: what it sent, as decoded, and for the parts that it owns also what encoding the sum lost. So what all said
adds up to what everybody decoded. What a member wanted to say and did not is its residual, which it adds to its next vector.

By top-k, the mean of those that sent an element stands for all, and the sum's elements are all sent. An element is on
nobody's account but the senders': to charge the others with the mean, so that accounts add up, was tried and diverges, for
two members that disagree then answer each other with ever larger corrections.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.codec.tensors import Codec, TensorInfo
from swarmnode.compress.codecs import Buffer
from swarmnode.compute.training.parts import (
    Encoded,
    contribution,
    decode_part,
    encode_part,
    reduce_part,
    share_of_nonzeros,
)

Offer = tuple[float, TensorInfo, Buffer]
"""What came from a member: its weight, and its values of a part, encoded."""


class Round:
    """One member's view of a sum. A contributor (weight above 0) offers every part to the part's owner, itself included;
    the owner settles its parts; everybody reads all settled parts, and the whole of them is the sum.

    `keep`: share of the elements that top-k sends. `accounted`: note what was said; it costs memory as large as the vector.
    """

    def __init__(
        self, vector_N: Tensor, weight: float, codec: Codec, *, keep: float = 1.0, accounted: bool = False
    ) -> None:
        self.vector_N = vector_N
        self.weight = weight
        self.codec = codec
        self.keep = keep
        self._said_N = torch.zeros_like(vector_N) if accounted and weight else None
        self._corrections: list[tuple[slice, Tensor]] = []

    def __repr__(self) -> str:
        return f"Round({len(self.vector_N)} elements, {self.codec.name}, weight {self.weight:.3f})"

    def offer(self, part: slice) -> Encoded:
        """This member's values of a part, for the part's owner."""
        info, payload = encode_part(self.vector_N[part], self.codec, self.keep)
        if self._said_N is not None:
            self._said_N[part] = self.read(part, info, payload)
        return info, payload

    def read(self, part: slice, info: TensorInfo, payload: Buffer) -> Tensor:
        """The values of a part that somebody sent. Raises ProtocolError where they are not what was agreed."""
        length = len(self.vector_N[part])
        return decode_part(info, payload, self.codec, length, self.vector_N.device)

    def settle(self, part: slice, offers: Sequence[Offer]) -> Encoded:
        """The owner's work: the sum of all offers, which are in the order of the members. Raises ProtocolError."""
        received = [
            contribution(weight, self.read(part, info, payload), self.codec) for weight, info, payload in offers
        ]
        total_N = reduce_part(received)
        encoded = encode_part(total_N, self.codec, share_of_nonzeros(total_N))
        if self._said_N is not None and self.codec != Codec.TOPK:
            self._corrections.append((part, self.read(part, *encoded) - total_N))
        return encoded

    def said(self) -> Tensor:
        """What this member has to answer for of the sum. Only for contributors, where `accounted`."""
        assert self._said_N is not None
        said_N = self._said_N.clone()
        for part, correction_N in self._corrections:
            said_N[part] += correction_N
        return said_N
