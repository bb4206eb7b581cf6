"""Streams of a session at one hop: the cursor over its inputs, the stream of its outputs, and the ring from the last
hop to the first.

Transcript: the inputs and outputs of one hop in one session, kept while it lasts, so that the hop can be held to
them in an audit.

Outputs are in the journal anyway, and drawn tokens are among the last hop's outputs. Inputs are kept as they came, in
the memory that the session has reserved for waiting inputs. So the transcript costs no step any time.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.codec.audit_messages import running_digest
from swarmnode.codec.body import MAX_TOKEN_ID, Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Attach, Input, Open, Output, ProposerKind, Truncate
from swarmnode.codec.tensors import ID_DTYPES, INT8_GROUP, PLAIN_CODECS, Codec, DType, TensorInfo
from swarmnode.compress.codecs import decode
from swarmnode.compute.serving.sampler import Drawn
from swarmnode.errors import NetworkDown, PeerError, PeerLost
from swarmnode.links.hop import Entry, Hop, until
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.interfaces import Buffer
from swarmnode.plan.compression import coarsest
from swarmnode.swarm.records.statement import Edge

ONE_ID = TensorInfo(Codec.NONE, DType.INT64, (1, 1))


def ids_input(ids: Sequence[int]) -> tuple[TensorInfo, bytes]:
    """Return token ids of one row as an input: int64, little-endian."""
    return TensorInfo(Codec.NONE, DType.INT64, (1, len(ids))), struct.pack(f"<{len(ids)}q", *ids)


def ids_in(info: TensorInfo, payload: Buffer) -> list[int] | None:
    """Return the token ids of an input of one row (int64 or int32); None if they do not fit the payload, or are no token
    ids."""
    ids = struct.Struct(f"<{info.shape[1]}{'q' if info.dtype == DType.INT64 else 'i'}")
    if len(payload) != ids.size:
        return None
    found = list(ids.unpack(payload))
    return found if 0 <= min(found) <= max(found) <= MAX_TOKEN_ID else None


@dataclass(eq=False)
class Ring:
    """Channel of a session from its first hop to its last one, a new one for each epoch.

    `on_frame` gets all its frames. `in_force` returns whether the session still goes on with an OPEN.
    """

    switchboard: Switchboard
    on_frame: Callable[[Frame, Body], None]
    in_force: Callable[[Open], bool]

    def __post_init__(self) -> None:
        self.channel: Channel | None = None

    def __repr__(self) -> str:
        return f"<Ring {'open' if self.channel is None else f'by {self.channel.peer}'}>"

    def unbind(self) -> None:
        """Close the channel on which the last hop sends tokens to the first one. Calling it again changes nothing."""
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()

    async def bind(
        self, opened: Open, start: Callable[[], int], on_fault: Callable[[PeerError | NetworkDown], None]
    ) -> None:
        """Subscribe at the last hop to the outputs of the route in `opened`, from position `start()` on, unless the session goes
        on with a newer OPEN.

        `on_fault` gets the error if the last hop cannot be reached or is lost.
        """
        if not self.in_force(opened):
            return
        try:
            channel = await self.switchboard.call(opened.route[-1].peer, self.on_frame, on_fault)
            if not self.in_force(opened):
                channel.close()
                return
            self.channel = channel
            channel.send(Attach(opened.session, opened.epoch, start=start()))
        except (PeerError, NetworkDown) as error:
            if self.in_force(opened):
                on_fault(error)


class InputCursor:
    """Cursor over inputs: positions below `accepted` are computed or queued; the client has the outputs for positions
    below `received_end`. Positions from `sure` on hold guesses, which may be taken back in a later `turn`."""

    def __init__(self, received_end: int) -> None:
        self.accepted = 0
        self.sure = 0
        self.received_end = received_end
        self.turn = 0  # grows when guesses are taken back, and with each epoch of a session that guesses
        self._back_to: int | None = None  # guesses to be taken back before the next input
        self.truncations = 0  # number of the last truncation that was received; 0 before the first
        self._truncate: Truncate | None = None  # to be applied before the next input
        self._ahead: dict[int, int] = {}  # tokens by position that came before their predecessors

    def truncate(self, body: Truncate) -> bool:
        """Go back to an earlier position before the next input. Returns False if this truncation was applied already."""
        if body.number <= self.truncations:
            return False
        to = body.to if self._truncate is None else min(body.to, self._truncate.to)
        self.truncations, self._truncate = body.number, Truncate(body.number, to)
        self.accepted, self.received_end, self.sure = body.to, min(self.received_end, body.to), min(self.sure, body.to)
        self._back_to = None  # the truncation goes back further
        self._ahead = {position: token for position, token in self._ahead.items() if position < body.to}
        return True

    def begin_turn(self, turn: int, to: int) -> int | None:
        """Begin a newer turn: the guesses from position `to` on do not count any more. Returns the position to go back
        to; None if the turn is not newer or no guess is there."""
        if turn <= self.turn:
            return None
        self.turn, to = turn, max(to, self.sure)
        if to >= self.accepted:
            return None
        self.accepted = to
        self._back_to = to if self._back_to is None else min(to, self._back_to)
        return to

    def confirm(self, sure: int) -> None:
        """Note that the positions below `sure` are of the text: guesses there were right."""
        self.sure = max(self.sure, min(sure, self.accepted))

    def advance(self, end: int, guessed: int = 0) -> tuple[int, Truncate | None]:
        """Accept the positions below `end`; the last `guessed` hold guesses. Returns the first of the new positions, and
        the truncation to apply before it or None."""
        start, self.accepted = self.accepted, end
        self.confirm(end - guessed)
        truncate, self._truncate = self._truncate, None
        return start, truncate

    def pop_retraction(self) -> int | None:
        """Return the first of the guesses to be taken back before the latest input; None if there are none. Later calls
        return None."""
        back_to, self._back_to = self._back_to, None
        return back_to

    def hold(self, position: int, token: int) -> None:
        """Keep a token as the input at `position`, unless that is accepted already. After a fault it may come before
        its predecessors."""
        if position >= self.accepted:
            self._ahead[position] = token

    def next_token(self) -> tuple[TensorInfo, bytes] | None:
        """Return the token at the next position as an input; None if it has not come yet."""
        token = self._ahead.pop(self.accepted, None)
        return None if token is None else (ONE_ID, struct.pack("<q", token))

    def next_ids(self) -> list[int]:
        """Remove and return the tokens at the next positions; empty if the next one has not come yet."""
        ids: list[int] = []
        while (token := self._ahead.pop(self.accepted + len(ids), None)) is not None:
            ids.append(token)
        return ids

    @property
    def waits(self) -> bool:
        """Whether tokens are here whose predecessors have not come yet."""
        return bool(self._ahead)


def output_of(drawn: Drawn) -> Output:
    """Return the OUTPUT of tokens that were drawn."""
    guess = drawn.guess
    return Output(
        drawn.ids,
        drawn.final,
        guessed=guess is not None,
        wasted=sum(drawn.wasted),
        forced=drawn.forced,
        guesses=drawn.guesses,
        proposer=ProposerKind.OTHER if guess is None else guess.proposer,
        wasted_by=drawn.wasted,
    )


class OutputStream:
    """Outputs of one session by position; late subscribers get the earlier ones, too."""

    def __init__(self) -> None:
        self._outputs: dict[int, tuple[Output, tuple[Buffer, ...]]] = {}
        self._subscribers: list[Channel] = []

    def held(self, position: int) -> Output | None:
        """Return the output at a position; None if there is none."""
        output, _ = self._outputs.get(position, (None, ()))
        return output

    def drawn(self) -> tuple[int, tuple[int, ...]]:
        """Return the position of the first, and the ids, of the latest consecutive drawn tokens of one row; no ids if
        none were drawn."""
        position, ids = max(self._outputs, default=0), list[int]()
        while (output := self.held(position)) is not None and output.ids:
            ids.append(output.ids[0])
            position -= 1
        return position + 1, tuple(reversed(ids))

    def publish(self, position: int, output: Output, payload: tuple[Buffer, ...], *, at_once: bool = False) -> None:
        """Send an output to all subscribers, `at_once` if no other message follows. A subscriber whose link is cut is
        dropped."""
        self._outputs[position] = (output, payload)
        for channel in list(self._subscribers):
            try:
                channel.send(output, seq=position, payload=payload, at_once=at_once)
            except PeerLost:
                self._subscribers.remove(channel)

    def forget(self) -> None:
        """Forget all outputs: no subscriber will ask for them again."""
        self._outputs.clear()

    def attach(self, channel: Channel, start: int) -> None:
        """Send the outputs from position `start` on to a channel, present and future ones."""
        self._subscribers.append(channel)
        for position, (output, payload) in sorted(self._outputs.items()):
            if position >= start:
                channel.send(output, seq=position, payload=payload)

    def detach(self, channel: Channel) -> None:
        """End the subscription of `channel`. Calling it again changes nothing."""
        if channel in self._subscribers:
            self._subscribers.remove(channel)

    def close(self, *last: Body) -> None:
        """End all subscriptions with the messages `last` (END by default)."""
        subscribers, self._subscribers = self._subscribers, []
        for channel in subscribers:
            for body in last[:-1]:
                if channel.open:
                    channel.send(body)
            channel.close(*last[-1:])


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
    def is_by_position(self) -> bool:
        """Whether what the receiver decodes of a position does not depend on the positions that were encoded with it: a group of
        elements with one scale must not reach into the next position."""
        infos = [entry.body.tensor for entry in self.entries]
        in_groups = Codec.INT8, Codec.INT4
        return all(
            info.codec in PLAIN_CODECS or (info.codec in in_groups and info.shape[-1] % INT8_GROUP == 0)
            for info in infos
        )

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
        self._is_recording = keeps
        self._received: list[Entry] = []
        self._base = 0
        self.questions = 0  # of audits that were answered

    def rebound(self, position: int) -> None:
        """Note that inputs from `position` on come from another neighbour, or from the same one in another epoch."""
        self._base = position

    def record(self, start: int, parts: Sequence[tuple[TensorInfo, Buffer]]) -> None:
        """Keep an input from position `start` on, if inputs are kept for audits."""
        if self._is_recording:
            for info, payload in parts:
                self._received.append(Entry(start, info.shape[1], Input(info), (payload,)))

    def retract(self, to: int) -> None:
        """Forget the inputs from position `to` on, which were guesses."""
        if self._received and self._received[-1].end > to:
            self._received = list(until(self._received, to))

    def end(self) -> None:
        """Keep and state nothing from now on: positions were taken back, so the edges no longer carried one text."""
        self._is_recording, self._received = False, []

    @property
    def received(self) -> Conveyed:
        """Inputs of this hop received up to now, for audits; empty if the hop keeps none."""
        return Conveyed(tuple(self._received), self._base)

    @property
    def sent(self) -> Conveyed:
        """Entries sent to the next hop up to now; empty at the last hop, or if nothing is kept."""
        return Conveyed(tuple(self._downstream.journal) if self._is_recording else (), self._downstream.had)

    @property
    def sent_tokens(self) -> Edge:
        """Digest and positions of the tokens that the last hop sent out; an empty Edge at other hops, or if nothing is kept."""
        base, ids = self._output_stream.drawn() if self._is_recording else (0, ())
        return Edge(ids_digest(torch.tensor(ids)), base, base + len(ids)) if ids else Edge()


def ids_digest(ids_T: Tensor) -> bytes:
    """Return the SHA-256 of token ids as int64, little-endian."""
    return hashlib.sha256(ids_T.to(torch.int64).numpy().astype("<i8").tobytes()).digest()


def _joined(payload: Sequence[Buffer]) -> Buffer:
    return payload[0] if len(payload) == 1 else b"".join(payload)
