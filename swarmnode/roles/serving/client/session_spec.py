"""What a session is, over all its epochs: what the client asks for, and so what may come out of it."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.codec.messages import Mode, Output, Sampling
from swarmnode.codec.tensors import Codec
from swarmnode.plan.routes.lattice import SessionSize

MAX_WIDTH = 1 << 20  # wider than any vocabulary


@dataclass(frozen=True)
class SessionSpec:
    """`width`: logits or hidden states that come out are no wider, token ids below it. `prompt_tokens` of `max_length`
    positions come at once, where that is known."""

    mode: Mode
    max_length: int
    rows: int = 1
    sampling: Sampling | None = None
    padding: tuple[int, ...] = ()
    codec: Codec = Codec.NONE
    prompt_tokens: int = 0
    width: int = MAX_WIDTH

    @property
    def size(self) -> SessionSize:
        """What routing knows of it."""
        return SessionSize(self.rows * self.prompt_tokens, self.rows * (self.max_length - self.prompt_tokens))

    def allows(self, output: Output, positions: int) -> bool:
        """Whether an output of so many positions can be this session's. Another one's descriptor might fill our memory, and its ids
        be refused by every hop that they are sent to."""
        if self.mode == Mode.RING:
            return len(output.ids) == self.rows and max(output.ids) < self.width
        if output.tensor is None:
            return False
        rows, count, width = output.tensor.shape
        return rows == self.rows and count == positions and 0 < width <= self.width
