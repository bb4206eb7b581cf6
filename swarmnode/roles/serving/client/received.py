"""What a client gets of a session."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.codec.messages import Output
from swarmnode.net.interfaces import Buffer


@dataclass(frozen=True)
class Received:
    """An output of the last hop: `position` is that of the token it is for (the one after the last input it covers)."""

    position: int
    output: Output
    payload: Buffer
