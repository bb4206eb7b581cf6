"""Input cursor: how far a session's inputs have come at one hop, what is taken back of them, and tokens that came too early."""

from __future__ import annotations

import struct

from swarmnode.codec.messages import Truncate
from swarmnode.codec.tensors import Codec, DType, TensorInfo

ONE_ID = TensorInfo(Codec.NONE, DType.INT64, (1, 1))


class InputCursor:
    """Positions below `accepted` are run or wait to be run; the client has the outputs for those below `known`."""

    def __init__(self, known: int) -> None:
        self.accepted = 0
        self.known = known
        self.truncations = 0  # the number of the last that was heard; 0 where none was
        self._truncate: Truncate | None = None  # that the next input follows
        self._ahead: dict[int, int] = {}  # tokens by position that wait for the ones before them

    def __repr__(self) -> str:
        return f"<InputCursor at {self.accepted}, {len(self._ahead)} tokens ahead, outputs known to {self.known}>"

    def truncate(self, body: Truncate) -> bool:
        """Go on from an earlier position, with the next input. False where that was done before the session moved here."""
        if body.number <= self.truncations:
            return False
        to = body.to if self._truncate is None else min(body.to, self._truncate.to)
        self.truncations, self._truncate = body.number, Truncate(body.number, to)
        self.accepted, self.known = body.to, min(self.known, body.to)
        self._ahead = {position: token for position, token in self._ahead.items() if position < body.to}
        return True

    def advance(self, end: int) -> tuple[int, Truncate | None]:
        """Accept the positions below `end`: the first of them, and what is cut off before it."""
        start, self.accepted = self.accepted, end
        truncate, self._truncate = self._truncate, None
        return start, truncate

    def hold(self, position: int, token: int) -> None:
        """A token is the input at a position, unless one is here already. After a fault it may come before the replay of what
        precedes it."""
        if position >= self.accepted:
            self._ahead[position] = token

    def next_token(self) -> tuple[TensorInfo, bytes] | None:
        """The token that follows what is accepted, as an input; None where it has not come."""
        token = self._ahead.pop(self.accepted, None)
        return None if token is None else (ONE_ID, struct.pack("<q", token))
