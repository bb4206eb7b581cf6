"""Session spec: the client's parameters of a session over all its epochs, the check of outputs, and the credit of its
hops."""

from __future__ import annotations

import array
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Input, LinkCodec, Mode, Output, Want
from swarmnode.codec.sampling import Sampling, pack_text, unpack_logprobs
from swarmnode.codec.tensors import Codec, DType, TensorInfo, payload_bytes
from swarmnode.errors import ProtocolError
from swarmnode.links.hop import Entry
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.plan.compression import CodecSchedule, coarsest
from swarmnode.plan.routes.routing import SessionSize
from swarmnode.serving.client.router import Route
from swarmnode.swarm.records.manifest import SERVING_CODECS

MAX_WIDTH = 1 << 20  # wider than any vocabulary
EXPONENTS = {DType.FLOAT32: ("<u4", 0x7F800000), DType.BFLOAT16: ("<u2", 0x7F80), DType.FLOAT16: ("<u2", 0x7C00)}
"""Bits of an element, and those of its exponent, which all are set in infinities and NaN"""


class ServedWork:
    """Work that hops did for one session, over all its routes and session ids."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[bytes, HopSpec], int] = {}
        self._copied: dict[tuple[bytes, HopSpec], int] = {}

    def record_copied(self, session: bytes, route: Route, tokens: int) -> None:
        """Record that `session` began with `tokens` tokens copied from another session. These hops get no second credit
        for them."""
        self._copied = {(session, hop): tokens for hop in route}

    def record_taken_over(self, session: bytes, hop: HopSpec, tokens: int) -> None:
        """Record that `hop` has the first `tokens` tokens of `session` from the hop that it replaces, which has the credit."""
        self._copied[session, hop] = tokens

    def record_computed(self, session: bytes, route: Route, tokens: int) -> None:
        """Record that an output shows that the hops of `route` have computed `tokens` tokens, counted over all rows."""
        for hop in route:
            self._tokens[session, hop] = max(0, tokens - self._copied.get((session, hop), 0))

    def by_peer_and_session(self) -> Iterator[tuple[tuple[PeerId, bytes], int]]:
        """Yield ((peer, session id), layers times tokens) for all work."""
        totals = Counter[tuple[PeerId, bytes]]()
        for (session, hop), tokens in self._tokens.items():
            totals[hop.peer, session] += (hop.end - hop.start) * tokens
        yield from totals.items()

    def drain(self) -> ServedWork:
        """Return all work and clear it here, so that no peer is credited twice."""
        other = ServedWork()
        other._tokens, self._tokens = self._tokens, {}
        return other


@dataclass(frozen=True)
class Received:
    """An output of the last hop. `position` is one after the last input position that the output covers."""

    position: int
    output: Output
    payload: Buffer


def ids_entry(start: int, ids_BT: Sequence[Sequence[int]], want: Want, reorder: tuple[int, ...] = ()) -> Entry:
    """Encode token ids as an entry of the journal: int64, little-endian, row-major."""
    flat = array.array("q", [token for row in ids_BT for token in row])
    if sys.byteorder == "big":
        flat.byteswap()
    info = TensorInfo(Codec.NONE, DType.INT64, (len(ids_BT), len(ids_BT[0])))
    return Entry(start, len(ids_BT[0]), Input(info, want=want, reorder=reorder), (flat.tobytes(),))


def _is_finite(info: TensorInfo, payload: Buffer) -> bool:
    """Return whether a payload is as long as its descriptor says, is not encoded, and holds neither NaN nor infinity."""
    bits, exponent = EXPONENTS[DType(info.dtype)]
    if info.codec != Codec.NONE or len(payload) != payload_bytes(info):
        return False
    return not bool(((np.frombuffer(payload, bits) & exponent) == exponent).any())


@dataclass(frozen=True)
class SessionSpec:
    """Specification of a session.

    Attributes:
        mode: RING (the swarm draws tokens) or DRIVEN (the client draws).
        max_length: Number of positions, which the hops reserve in their caches.
        rows: Sequences computed side by side.
        sampling: Parameters of the draw, in RING mode.
        padding: Left padding of each row; empty if there is none.
        codec: Codec of the states between hops, unless `codecs` names another one for a layer and position.
        adapts: Whether hops choose codecs themselves, among `allowed`.
        codecs: Codecs already chosen, by layer and position.
        allowed: Codecs that the swarm allows.
        prompt_tokens: Positions that come at once, 0 if not known.
        prompt: Token ids before the drawn tokens.
        width: Upper bound of token ids and of the width of outputs (logits or hidden states).
        adapter: Name of the swarm's adapter that changes the model; "" is the model alone.
        proposer: Source of guesses in RING mode: "lookup", "auto" or the name of a draft model; "" is none.
    """

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
    proposer: str = ""

    @property
    def size(self) -> SessionSize:
        """Plan of the session for routing: positions of the prompt and positions after it, over all rows, and the proposer."""
        new_tokens = self.rows * (self.max_length - self.prompt_tokens)
        return SessionSize(self.rows * self.prompt_tokens, new_tokens, self.proposer)

    @property
    def follows_grammar(self) -> bool:
        """Whether tokens follow a grammar, whose matcher is made for a new session only."""
        return self.sampling is not None and self.sampling.grammar is not None

    def is_computed_as(self, other: SessionSpec) -> bool:
        """Return whether caches of this session are valid for `other`: they have the same codecs and adapter."""
        return (self.codec, self.adapts, self.adapter) == (other.codec, other.adapts, other.adapter)

    def codec_into(self, unit: int, end: int) -> Codec:
        """Return the coarsest codec used for positions below `end` when they entered `unit`."""
        schedule = CodecSchedule(self.codec, ((one.start, Codec(one.codec)) for one in self.codecs if one.unit == unit))
        return schedule.coarsest(end)

    def coarsest(self, unit: int, end: int) -> Codec:
        """Return the coarsest codec that positions below `end` had passed through when they entered `unit`, on any
        route."""
        met = {one.unit for one in self.codecs if one.unit <= unit}
        return coarsest([self.codec, *(self.codec_into(one, end) for one in met)])

    def text(self, drawn: Sequence[int]) -> bytes:
        """Encode the text that goes with an OPEN after `drawn` tokens; empty if neither a penalty nor a grammar needs
        it."""
        if self.sampling is None or not self.sampling.counts_tokens:
            return b""
        return pack_text([*(self.prompt if self.sampling.counts_prompt else ()), *drawn])

    def allows(self, output: Output, payload: Buffer, positions: int) -> bool:
        """Return whether an output for `positions` positions fits this session.

        An output that does not could fill the client's memory, or carry ids that every hop refuses.
        """
        if self.mode == Mode.RING:
            return len(output.ids) == self.rows and max(output.ids) < self.width and self._has_logprobs(output, payload)
        if output.tensor is None:
            return False
        rows, count, width = output.tensor.shape
        fits = rows == self.rows and count == positions and 0 < width <= self.width
        return fits and _is_finite(output.tensor, payload)

    def _has_logprobs(self, output: Output, payload: Buffer) -> bool:
        """Return whether the payload has the log probabilities that were requested, and nothing else."""
        wanted = None if self.sampling is None else self.sampling.logprobs
        if wanted is None:
            return len(payload) == 0
        try:
            told = unpack_logprobs(payload)
        except ProtocolError:
            return False
        known = all(one.id < self.width for one in told)
        return known and 1 <= len(told) <= 1 + wanted and told[0].id == output.ids[0]
