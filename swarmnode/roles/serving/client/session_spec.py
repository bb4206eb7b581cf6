"""What a session is, over all its epochs: what the client asks for, and so what may come out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.codec.logprobs import unpack_logprobs
from swarmnode.codec.messages import Mode, Output, Sampling
from swarmnode.codec.sampling import pack_text
from swarmnode.codec.tensors import Codec
from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import Buffer
from swarmnode.plan.routes.lattice import SessionSize

MAX_WIDTH = 1 << 20  # wider than any vocabulary


@dataclass(frozen=True)
class SessionSpec:
    """`width`: logits or hidden states that come out are no wider, token ids below it. `prompt_tokens` of `max_length`
    positions come at once, where that is known. `prompt` is what goes before the drawn tokens."""

    mode: Mode
    max_length: int
    rows: int = 1
    sampling: Sampling | None = None
    padding: tuple[int, ...] = ()
    codec: Codec = Codec.NONE
    prompt_tokens: int = 0
    prompt: tuple[int, ...] = ()
    width: int = MAX_WIDTH

    @property
    def size(self) -> SessionSize:
        """What routing knows of it."""
        return SessionSize(self.rows * self.prompt_tokens, self.rows * (self.max_length - self.prompt_tokens))

    def text(self, drawn: Sequence[int]) -> bytes:
        """What goes with an OPEN where so many tokens have been drawn already."""
        if self.sampling is None or not self.sampling.counts_tokens:
            return b""
        return pack_text([*(self.prompt if self.sampling.counts_prompt else ()), *drawn])

    def allows(self, output: Output, payload: Buffer, positions: int) -> bool:
        """Whether an output of so many positions can be this session's. Another one's descriptor might fill our memory, and its ids
        be refused by every hop that they are sent to."""
        if self.mode == Mode.RING:
            return len(output.ids) == self.rows and max(output.ids) < self.width and self._has_logprobs(output, payload)
        if output.tensor is None:
            return False
        rows, count, width = output.tensor.shape
        return rows == self.rows and count == positions and 0 < width <= self.width

    def _has_logprobs(self, output: Output, payload: Buffer) -> bool:
        """Whether the payload tells the logarithms that are wanted, and none else."""
        wanted = None if self.sampling is None else self.sampling.logprobs
        if wanted is None:
            return len(payload) == 0
        try:
            told = unpack_logprobs(payload)
        except ProtocolError:
            return False
        known = all(one.id < self.width for one in told)
        return known and 1 <= len(told) <= 1 + wanted and told[0].id == output.ids[0]
