"""What a hop took in and sent on in one session, kept while it lasts, so that it can be made to stand by it.

What was sent is in the journal anyway, and what the last hop drew is with its outputs. What came in is kept as it came, in the room
that the session has reserved for inputs that wait: no step costs more for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.codec.audit_messages import running_digest
from swarmnode.codec.messages import Input
from swarmnode.codec.tensors import ID_DTYPES, Codec, TensorInfo
from swarmnode.compress.codecs import decode
from swarmnode.net.interfaces import Buffer
from swarmnode.net.links.hop import Entry, Hop
from swarmnode.plan.serving.codec_schedule import coarsest
from swarmnode.serving.session.session_streams import OutputStream
from swarmnode.swarm.records.statement import Edge


@dataclass(frozen=True)
class Conveyed:
    """What went over one edge of a session: every entry, and from which position on it came from the present neighbour."""

    entries: Sequence[Entry]
    base: int

    @property
    def length(self) -> int:
        """Positions that went over it, from 0 on."""
        return self.entries[-1].end if self.entries else 0

    @property
    def is_ids(self) -> bool:
        """Whether token ids went over it."""
        return bool(self.entries) and self.entries[0].body.tensor.dtype in ID_DTYPES

    @property
    def codec(self) -> Codec:
        """The coarsest in which any of it travelled."""
        return coarsest(Codec(entry.body.tensor.codec) for entry in self.entries)

    def edge(self) -> Edge:
        """As a statement has it."""
        if not self.entries:
            return Edge()
        if self.is_ids:
            return Edge(ids_digest(self._tensor(0, self.length)), 0, self.length)
        since = [entry for entry in self.entries if entry.end > self.base]
        digest = running_digest((entry.start, entry.count, _joined(entry.payload)) for entry in since)
        return Edge(digest, self.base, self.length)

    def hidden(self, first: int, count: int) -> Tensor:
        """hidden_TH of positions [first, first + count), as the receiver decodes them."""
        return self._tensor(first, first + count)

    def _tensor(self, first: int, end: int) -> Tensor:
        parts, position = [], first
        for entry in self.entries:
            if position >= end or entry.end <= position:
                continue
            part_T = decode(entry.body.tensor, _joined(entry.payload))[0]
            parts.append(part_T[position - entry.start : min(entry.end, end) - entry.start])
            position = min(entry.end, end)
        return torch.cat(parts)


class Transcript:
    """Of one session at one hop. Only sessions of one row are kept."""

    def __init__(self, downstream: Hop, output_stream: OutputStream, *, keeps: bool) -> None:
        self._downstream = downstream
        self._output_stream = output_stream
        self._keeps = keeps
        self._received: list[Entry] = []
        self._base = 0

    def __repr__(self) -> str:
        return f"<Transcript of {len(self._received)} inputs>"

    def rebound(self, position: int) -> None:
        """From this position on inputs come from another neighbour, or from the same one in another epoch."""
        self._base = position

    def take(self, start: int, parts: Sequence[tuple[TensorInfo, Buffer]]) -> None:
        """An input came in whose first position is `start`."""
        if self._keeps:
            for info, payload in parts:
                self._received.append(Entry(start, info.shape[1], Input(info), (payload,)))

    def end(self) -> None:
        """Positions are taken back: what went over the edges is not one text any more. Nothing is kept or stated from here on."""
        self._keeps, self._received = False, []

    @property
    def received(self) -> Conveyed:
        """What came in so far."""
        return Conveyed(tuple(self._received), self._base)

    @property
    def sent(self) -> Conveyed:
        """What was sent on so far; nothing at the last hop."""
        return Conveyed(tuple(self._downstream.journal) if self._keeps else (), self._downstream.had)

    @property
    def told(self) -> Edge:
        """Of the tokens that the last hop has told; empty at the others."""
        base, ids = self._output_stream.drawn() if self._keeps else (0, ())
        return Edge(ids_digest(torch.tensor(ids)), base, base + len(ids)) if ids else Edge()


def ids_digest(ids_T: Tensor) -> bytes:
    """Of token ids as int64, little-endian."""
    return hashlib.sha256(ids_T.to(torch.int64).numpy().astype("<i8").tobytes()).digest()


def _joined(payload: Sequence[Buffer]) -> Buffer:
    return payload[0] if len(payload) == 1 else b"".join(payload)
