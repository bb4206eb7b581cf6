"""Transcript: the inputs and outputs of one hop in one session, kept while it lasts, so that the hop can be held to
them in an audit.

Outputs are in the journal anyway, and drawn tokens are among the last hop's outputs. Inputs are kept as they came, in
the memory that the session has reserved for waiting inputs. So the transcript costs no step any time.
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
from swarmnode.net.links.hop import Entry, Hop, until
from swarmnode.plan.serving.codec_schedule import coarsest
from swarmnode.serving.session.session_streams import OutputStream
from swarmnode.swarm.records.statement import Edge


@dataclass(frozen=True)
class Conveyed:
    """All entries sent over one edge of a session, and the first position (`base`) sent by the present neighbour."""

    entries: Sequence[Entry]
    base: int

    @property
    def length(self) -> int:
        """Number of positions conveyed, from position 0 on."""
        return self.entries[-1].end if self.entries else 0

    def until(self, length: int) -> Conveyed:
        """Return the values of the first `length` positions; all values if `length` is 0."""
        return self if length == 0 else Conveyed(tuple(until(self.entries, length)), self.base)

    @property
    def is_ids(self) -> bool:
        """Whether the values are token ids rather than hidden states."""
        return bool(self.entries) and self.entries[0].body.tensor.dtype in ID_DTYPES

    @property
    def codec(self) -> Codec:
        """The codec that loses most among those that carried these values."""
        return coarsest(Codec(entry.body.tensor.codec) for entry in self.entries)

    def edge(self) -> Edge:
        """Return the summary of these values for a signed statement: a digest and the range of positions."""
        if not self.entries:
            return Edge()
        if self.is_ids:
            return Edge(ids_digest(self._tensor(0, self.length)), 0, self.length)
        since = [entry for entry in self.entries if entry.end > self.base]
        digest = running_digest((entry.start, entry.count, _joined(entry.payload)) for entry in since)
        return Edge(digest, self.base, self.length)

    def hidden(self, first: int, count: int) -> Tensor:
        """Return hidden_TH of positions [first, first + count), as the receiver decodes them."""
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
    """Record of what one session sent and received at one hop, for audits. Only sessions of one row are kept."""

    def __init__(self, downstream: Hop, output_stream: OutputStream, *, keeps: bool) -> None:
        self._downstream = downstream
        self._output_stream = output_stream
        self._keeps = keeps
        self._received: list[Entry] = []
        self._base = 0

    def __repr__(self) -> str:
        return f"<Transcript of {len(self._received)} inputs>"

    def rebound(self, position: int) -> None:
        """Note that inputs from `position` on come from another neighbour, or from the same one in another epoch."""
        self._base = position

    def take(self, start: int, parts: Sequence[tuple[TensorInfo, Buffer]]) -> None:
        """Keep an input from position `start` on, if inputs are kept for audits."""
        if self._keeps:
            for info, payload in parts:
                self._received.append(Entry(start, info.shape[1], Input(info), (payload,)))

    def take_back(self, to: int) -> None:
        """Forget the inputs from position `to` on, which were guesses."""
        if self._received and self._received[-1].end > to:
            self._received = list(until(self._received, to))

    def end(self) -> None:
        """Keep and state nothing from now on: positions were taken back, so the edges no longer carried one text."""
        self._keeps, self._received = False, []

    @property
    def received(self) -> Conveyed:
        """Inputs of this hop received up to now, for audits; empty if the hop keeps none."""
        return Conveyed(tuple(self._received), self._base)

    @property
    def sent(self) -> Conveyed:
        """Entries sent to the next hop up to now; empty at the last hop, or if nothing is kept."""
        return Conveyed(tuple(self._downstream.journal) if self._keeps else (), self._downstream.had)

    @property
    def told(self) -> Edge:
        """Digest and positions of the tokens that the last hop sent out; an empty Edge at other hops, or if nothing is kept."""
        base, ids = self._output_stream.drawn() if self._keeps else (0, ())
        return Edge(ids_digest(torch.tensor(ids)), base, base + len(ids)) if ids else Edge()


def ids_digest(ids_T: Tensor) -> bytes:
    """Return the SHA-256 of token ids as int64, little-endian."""
    return hashlib.sha256(ids_T.to(torch.int64).numpy().astype("<i8").tobytes()).digest()


def _joined(payload: Sequence[Buffer]) -> Buffer:
    return payload[0] if len(payload) == 1 else b"".join(payload)
