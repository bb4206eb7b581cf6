"""Round: one vector that the members of a group sum up, and how much of the sum each of them has to answer for.

What a codec loses must not be lost for good (error feedback: Stich et al., arXiv 1809.07599). So each member keeps account of
what it *said*: its own share of the agreed sum, such that the shares of all members add up to what everybody decoded.

- An element that a member sent: what it sent, as decoded.
- An element that it did not send (top-k) but others did: the mean of those stood for it too, with its weight.
- The owner of a part answers for what encoding the sum lost, in addition.

What a member wanted to say and did not is its residual, which it adds to its next vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.codec.tensors import Codec, TensorInfo
from swarmnode.compress.codecs import Buffer
from swarmnode.compute.training.parts import (
    Contribution,
    Encoded,
    contribution,
    decode_part,
    encode_part,
    reduce_part,
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
        encoded = encode_part(reduce_part(received), self.codec, self.keep)
        if self._said_N is not None:
            agreed_N = self.read(part, *encoded)
            correction_N = agreed_N.clone()
            for member in received:
                correction_N -= _said(member, agreed_N)
            self._corrections.append((part, correction_N))
        return encoded

    def said(self, total_N: Tensor) -> Tensor:
        """This member's share of the sum; all members' add up to it. Only for contributors, where `accounted`."""
        assert self._said_N is not None
        said_N = _said(contribution(self.weight, self._said_N, self.codec), total_N)
        for part, correction_N in self._corrections:
            said_N[part] += correction_N
        return said_N


def _said(member: Contribution, agreed_N: Tensor) -> Tensor:
    if member.sent_N is None:
        return member.values_N
    return torch.where(member.sent_N, member.values_N, agreed_N * member.weight)
