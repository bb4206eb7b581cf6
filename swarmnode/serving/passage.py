"""Passage of one microbatch through a hop: a training worker, an adapter that is tuned and a served graph share its order.

Values come in, are checked, pass the hop's parts on their devices and leave for the next hop. If the microbatch learns, gradients
come back, are checked, pass the parts in reverse and leave for the sender. An error names the peer whose values it follows from.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from swarmnode.codec.body import Body
from swarmnode.codec.messages import End, Error
from swarmnode.codec.tensors import LARGEST_VALUE, TensorInfo
from swarmnode.compress.codecs import Encoded, decode_values
from swarmnode.compute.executor import ByPiece, Urgency
from swarmnode.compute.training.saved_activations import Gradients, is_within
from swarmnode.compute.training.segment import Values
from swarmnode.errors import ErrorCode, NetworkDown, PeerError, PeerLost, ProtocolError, blaming, refusal
from swarmnode.links.switchboard import Channel, OnFrame, OnLost, Switchboard
from swarmnode.measuring.meters import BACKWARD, FORWARD
from swarmnode.net.interfaces import Buffer, PeerId

Part = TypeVar("Part")
T = TypeVar("T")

URGENCY = {FORWARD: Urgency.FORWARD, BACKWARD: Urgency.BACKWARD}


class MicrobatchPassage(ABC, Generic[Part]):
    """Passage of one microbatch through the `parts` of a hop, each on its device, there and back.

    Methods that return a work (`ByPiece`) run on a part's device, through `compute`. The values None are those that came to the
    hop. A passage without a way back has no `turn`, `backward` and `finish`.
    """

    parts: Sequence[Part]
    ends_here = False
    """Whether this hop computes the loss, with which the way back begins"""
    sender: PeerId | None = None
    """Peer that is at fault if a part cannot compute the values that came; None if only malformed values are a peer's fault"""
    receiver: PeerId | None = None
    """The same for the gradients that come back"""

    @abstractmethod
    async def compute(self, phase: str, part: Part, work: ByPiece[T]) -> T:
        """Run a work of the phase FORWARD or BACKWARD on the device of `part`, and return its result."""

    def forward(self, part: Part, values: Values | None) -> ByPiece[Values]:
        """Compute the outputs of a part that is not the last one."""
        raise NotImplementedError

    @abstractmethod
    def leave(self, part: Part, values: Values | None) -> ByPiece[Encoded]:
        """Compute the outputs of the last part, and encode them for the next peer."""

    @abstractmethod
    async def send_on(self, encoded: Encoded) -> Any:
        """Send the outputs to the next peer, and return its answer; None if the microbatch has no way back."""

    def turn(self, part: Part, answer: Any) -> ByPiece[Any]:
        """Compute the gradients of the last part's inputs from those in the answer of the next peer."""
        raise NotImplementedError

    def finish(self, part: Part, values: Values | None) -> ByPiece[Any]:
        """Compute the loss on the last part, and the gradients of its inputs; None if the microbatch has no way back."""
        raise NotImplementedError

    def backward(self, part: Part, gradients: Any) -> ByPiece[Any]:
        """Compute the gradients of a part's inputs. The first part encodes them for the sender."""
        raise NotImplementedError

    async def cross(self) -> Any:
        """Take the microbatch there and back. Returns the gradients for the sender; None if it has no way back."""
        if not self.ends_here:
            answer = await self.send_on(await self.there(self.leave))
            return None if answer is None else await self.turn_back(answer)
        gradients = await self.there(self.finish)
        with blaming(self.sender):
            return None if gradients is None else await self.back(gradients)

    async def there(self, last_work: Callable[[Part, Values | None], ByPiece[Any]]) -> Any:
        """Compute all parts forward, the last one with `last_work`, and return its result."""
        values: Values | None = None
        with blaming(self.sender):
            for part in self.parts[:-1]:
                values = await self.compute(FORWARD, part, self.forward(part, values))
            return await self.compute(FORWARD, self.parts[-1], last_work(self.parts[-1], values))

    async def turn_back(self, answer: Any) -> Any:
        """Take the gradients in an answer back through all parts, and return what the first one makes of those of the inputs."""
        with blaming(self.receiver):
            return await self.back(await self.compute(BACKWARD, self.parts[-1], self.turn(self.parts[-1], answer)))

    async def back(self, gradients: Any) -> Any:
        """Take the gradients of the last part's inputs back through the parts before it, and return what the first one makes."""
        for part in reversed(self.parts[:-1]):
            gradients = await self.compute(BACKWARD, part, self.backward(part, gradients))
        return gradients


async def within(work: Awaitable[T], within_s: float, what: str) -> T:
    """Wait for `work`. Raises ProtocolError (BUSY), which says that `what` took too long, after `within_s` seconds."""
    try:
        return await asyncio.wait_for(work, within_s)
    except asyncio.TimeoutError:
        raise ProtocolError(f"{what} for more than {within_s:.0f} s", code=ErrorCode.BUSY) from None


# -- values on their way


def read_from(
    sender: str, infos: Sequence[TensorInfo], payload: Buffer, device: torch.device | str, *, bounded: bool = True
) -> Values:
    """Return the values that the peer `sender` sent: floats on `device`, integers on the host.

    Raises ProtocolError, which names the peer, if they are malformed, or, if `bounded`, a float is NaN or above LARGEST_VALUE.
    """
    with blaming(sender):
        values = decode_values(infos, payload, device)
        if bounded and not is_within(values, LARGEST_VALUE):
            raise ProtocolError("values that are NaN, infinite or would overflow", code=ErrorCode.NOT_FINITE)
    return values


def read_gradients(
    sender: str, present: Sequence[bool], infos: Sequence[TensorInfo], payload: Buffer, device: torch.device | str
) -> Gradients:
    """Return the gradients that the peer `sender` sent, None for values that have none. Raises ProtocolError as `read_from`."""
    flowing = iter(read_from(sender, infos, payload, device))
    return tuple(next(flowing) if is_there else None for is_there in present)


# -- conversations that carry them


async def call_hop(board: Switchboard, peer: PeerId, on_frame: OnFrame, on_lost: OnLost) -> Channel:
    """Begin a conversation with a hop. Raises PeerLost, which names the hop, also if there is no network."""
    try:
        return await board.call(peer, on_frame, on_lost)
    except NetworkDown as error:
        raise PeerLost(str(error), peer=peer) from error


def ending(body: Body, peer: PeerId) -> PeerError | None:
    """Return the error of a hop that ended its conversation with `body`; None if the message does not end it."""
    if isinstance(body, Error):
        return refusal(body.code, retry_s=body.retry_s, peer=peer)
    return PeerLost(f"peer {peer} ended the conversation", peer=peer) if isinstance(body, End) else None
