"""Session spec: what a client asks of a session over all its epochs, which outputs fit it, and the work that its hops are
credited for."""

from __future__ import annotations

import array
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Input, LinkCodec, Mode, Output, Want
from swarmnode.codec.sampling import Sampling, pack_text, unpack_logprobs
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.links.hop import Entry
from swarmnode.plan.routes.lattice import SessionSize
from swarmnode.plan.serving.codec_schedule import CodecSchedule, coarsest
from swarmnode.serving.client.router import Route
from swarmnode.swarm.records.manifest import SERVING_CODECS

MAX_WIDTH = 1 << 20  # wider than any vocabulary


class ServedWork:
    """Of one session over all its routes, by the ids that it had."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[bytes, HopSpec], int] = {}
        self._given: dict[tuple[bytes, HopSpec], int] = {}

    def __repr__(self) -> str:
        return f"<ServedWork {dict(self.by_peer_and_session())}>"

    def given(self, session: bytes, route: Route, tokens: int) -> None:
        """A session began with so many tokens of another one, which these hops are not credited for once more."""
        self._given = {(session, hop): tokens for hop in route}

    def heard(self, session: bytes, route: Route, tokens: int) -> None:
        """An output came for which the hops of this route have computed so many tokens, of all rows."""
        for hop in route:
            self._tokens[session, hop] = max(0, tokens - self._given.get((session, hop), 0))

    def by_peer_and_session(self) -> Iterator[tuple[tuple[PeerId, bytes], int]]:
        """Who did how much under which id, in units times tokens."""
        totals = Counter[tuple[PeerId, bytes]]()
        for (session, hop), tokens in self._tokens.items():
            totals[hop.peer, session] += (hop.end - hop.start) * tokens
        yield from totals.items()

    def taken(self) -> ServedWork:
        """All of it, which is not here any more: nobody is credited twice."""
        other = ServedWork()
        other._tokens, self._tokens = self._tokens, {}
        return other


@dataclass(frozen=True)
class Received:
    """An output of the last hop: `position` is that of the token it is for (the one after the last input it covers)."""

    position: int
    output: Output
    payload: Buffer


def ids_entry(start: int, ids_BT: Sequence[Sequence[int]], want: Want, reorder: tuple[int, ...] = ()) -> Entry:
    """Token ids as an entry of the journal: int64, little-endian, row-major."""
    flat = array.array("q", [token for row in ids_BT for token in row])
    if sys.byteorder == "big":
        flat.byteswap()
    info = TensorInfo(Codec.NONE, DType.INT64, (len(ids_BT), len(ids_BT[0])))
    return Entry(start, len(ids_BT[0]), Input(info, want=want, reorder=reorder), (flat.tobytes(),))


@dataclass(frozen=True)
class SessionSpec:
    """`width`: logits or hidden states that come out are no wider, token ids below it. `prompt_tokens` of `max_length`
    positions come at once, where that is known. `prompt` is what goes before the drawn tokens. States between hops travel as
    `codec`, but for what `codecs` says; where it `adapts`, as the hops choose among what the swarm has `allowed`. They go
    through the model as its `adapter` of this name changes it."""

    mode: Mode
    max_length: int
    rows: int = 1
    sampling: Sampling | None = None
    padding: tuple[int, ...] = ()
    codec: Codec = Codec.NONE
    adapts: bool = False
    codecs: tuple[LinkCodec, ...] = ()
    allowed: frozenset[int] = frozenset(SERVING_CODECS)
    prompt_tokens: int = 0
    prompt: tuple[int, ...] = ()
    width: int = MAX_WIDTH
    adapter: str = ""

    @property
    def size(self) -> SessionSize:
        """What routing knows of it."""
        return SessionSize(self.rows * self.prompt_tokens, self.rows * (self.max_length - self.prompt_tokens))

    @property
    def follows_grammar(self) -> bool:
        """Whether tokens are drawn by a grammar. Its matcher is made for a new session."""
        return self.sampling is not None and self.sampling.grammar is not None

    def is_computed_as(self, other: SessionSpec) -> bool:
        """Whether what the hops hold of another session is what they would hold of this one."""
        return (self.codec, self.adapts, self.adapter) == (other.codec, other.adapts, other.adapter)

    def codec_into(self, unit: int, end: int) -> Codec:
        """The coarsest codec in which the positions below `end` entered a unit."""
        schedule = CodecSchedule(self.codec, ((one.start, Codec(one.codec)) for one in self.codecs if one.unit == unit))
        return schedule.coarsest(end)

    def coarsest(self, unit: int, end: int) -> Codec:
        """The coarsest codec that the positions below `end` had met when they entered a unit, on whatever route."""
        met = {one.unit for one in self.codecs if one.unit <= unit}
        return coarsest([self.codec, *(self.codec_into(one, end) for one in met)])

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
