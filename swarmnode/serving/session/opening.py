"""Opening of a session at one hop.

OPEN fixes its layers, shape and memory. The module also checks OPEN and INPUT, and keeps each ATTACH that comes before
its OPEN.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict

import torch

from swarmnode.codec.body import MAX_WANTED_POSITIONS
from swarmnode.codec.handover_messages import CachePart, CacheReply
from swarmnode.codec.messages import LOOKUP, Attach, Error, Input, Mode, Open, Want
from swarmnode.codec.sampling import ID_BYTES, LOGPROB_BYTES, Sampling, unpack_text
from swarmnode.codec.tensors import FLOAT_DTYPES, ID_DTYPES, Codec, DType
from swarmnode.compress.codecs import TORCH_DTYPE, decode_values, encode_values
from swarmnode.compute.model.traced_model import LayerState, States
from swarmnode.compute.serving.cache import TensorKind
from swarmnode.compute.serving.grammar import GrammarMatcher
from swarmnode.compute.serving.sampler import Sampler
from swarmnode.compute.serving.states import SessionCopy
from swarmnode.config import ServerConfig
from swarmnode.errors import ErrorCode, PeerError, PeerLost, ProtocolError
from swarmnode.links.hop import ENTRY_BYTES
from swarmnode.links.switchboard import Channel
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.serving.drafting.lookup import MAX_TOKENS, TOKEN_BYTES
from swarmnode.serving.drafting.model_drafter import TEXT_BYTES

WIDEST_BYTES = 4  # per element, whatever the codec
SESSION_BYTES = 16 * 1024  # memory of the Python objects of a session
GRAMMAR_BYTES = 16 << 20  # memory that a grammar's lexer may come to hold (`compute/serving/grammar.py`)


class EarlyAttaches:
    """ATTACH messages by session, kept until the session opens. Their number is limited; a peer with too many loses its
    own."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._waiting: OrderedDict[bytes, list[tuple[Channel, Attach]]] = OrderedDict()

    def pop_attaches(self, session: bytes) -> list[tuple[Channel, Attach]]:
        """Remove and return the ATTACH messages that arrived before the session was opened; empty if there are none."""
        return self._waiting.pop(session, [])

    def store_attach(self, channel: Channel, body: Attach) -> None:
        """Keep an ATTACH until its session opens.

        Above a limit the oldest message of the peer, the session or the server is refused with NO_SESSION.
        """
        own = [early for attaches in self._waiting.values() for early, _ in attaches if early.peer == channel.peer]
        if len(own) >= self._config.max_early_per_peer:
            own[0].on_lost(PeerLost("too many subscriptions wait", peer=channel.peer))
            own[0].close(Error(ErrorCode.NO_SESSION))
        waiting = self._waiting.setdefault(body.session, [])
        waiting.append((channel, body))

        def forget(_error: PeerError | None = None) -> None:
            if (channel, body) in waiting:
                waiting.remove((channel, body))
            if not waiting:
                self._waiting.pop(body.session, None)

        channel.on_lost = forget
        if len(waiting) > self._config.max_early_per_session:
            waiting.pop(0)[0].close(Error(ErrorCode.NO_SESSION))
        if len(self._waiting) > self._config.max_early_attaches:
            for old, _attach in self._waiting.popitem(last=False)[1]:
                old.close(Error(ErrorCode.NO_SESSION))


def is_last(opened: Open) -> bool:
    """Return whether the receiver of an OPEN is the last hop of the route."""
    return opened.index + 1 == len(opened.route)


def units_of(opened: Open) -> tuple[int, int]:
    """Return the layers [start, end) that the receiver of an OPEN computes."""
    hop = opened.route[opened.index]
    return hop.start, hop.end


def journal_bytes(opened: Open, hidden_size: int) -> int:
    """Return the largest number of bytes of host memory that a session may take here.

    That is its journal for sending again (outputs at the last hop, else inputs of the next hop), its waiting inputs, and
    its objects. At the first hop it is also the text that guesses come from.
    """
    sends = not (is_last(opened) and opened.mode == Mode.RING)
    takes = units_of(opened)[0] > 0
    states_bytes = opened.rows * WIDEST_BYTES * hidden_size * (sends + takes)
    position_bytes = ENTRY_BYTES + states_bytes + _drawing_bytes(opened.sampling)
    fixed_bytes = SESSION_BYTES + GRAMMAR_BYTES * draws_by_grammar(opened) + _drafting_bytes(opened)
    return fixed_bytes + opened.max_length * position_bytes


def _drawing_bytes(sampling: Sampling | None) -> int:
    """Return the bytes per position for drawing: the token, as received and as counted by penalties, and its log
    probabilities."""
    if sampling is None:
        return 0
    logprobs = 0 if sampling.logprobs is None else 1 + sampling.logprobs
    return 2 * ID_BYTES * sampling.counts_tokens + LOGPROB_BYTES * logprobs


def _drafting_bytes(opened: Open) -> int:
    """Return the bytes of the text so that the first hop can guess; 0 at other hops, or without guesses."""
    if opened.index > 0 or not opened.drafts:
        return 0
    model_bytes = TEXT_BYTES if opened.proposer != LOOKUP else 0
    return opened.max_length * (ID_BYTES + model_bytes) + min(opened.max_length, MAX_TOKENS) * TOKEN_BYTES


def draws_by_grammar(opened: Open) -> bool:
    """Return whether the receiver draws the tokens, and by a grammar."""
    return is_last(opened) and opened.sampling is not None and opened.sampling.grammar is not None


def sampler_of(opened: Open, grammar: GrammarMatcher | None = None) -> Sampler | None:
    """Return the sampler of a session at the receiver of an OPEN; None unless the receiver draws the tokens."""
    if not is_last(opened) or opened.sampling is None:
        return None
    return Sampler(opened.sampling, opened.max_length, grammar, foresees=opened.drafts)


def first_drawn(opened: Open) -> int:
    """Return the first position whose token is drawn in the epoch of an OPEN."""
    return max(opened.known, 0 if opened.sampling is None else opened.sampling.prompt_length)


def inputs_end(opened: Open) -> int:
    """Return the position after the last one whose input leads to a token, in RING mode."""
    assert opened.sampling is not None
    return min(opened.max_length, opened.sampling.prompt_length + opened.sampling.max_new_tokens - 1)


def is_for(opened: Open, own: PeerId, sender: PeerId) -> bool:
    """Return whether an OPEN is valid for the peer `own`, coming from `sender`.

    The route must have no gap, name `own` at the receiver's place and `sender` just before it. RING mode needs sampling
    and one row.
    """
    route, index = opened.route, opened.index
    joined = all(left.end == right.start for left, right in itertools.pairwise(route))
    return (
        joined
        and index < len(route)
        and route[index].peer == own
        and (index == 0 or route[index - 1].peer == sender)
        and (opened.mode != Mode.RING or (opened.sampling is not None and opened.rows == 1))
    )


def shape_of(opened: Open) -> tuple[object, ...]:
    """Return the properties that cannot change over a session's epochs without making its cache useless."""
    return (units_of(opened), opened.mode, opened.rows, opened.padding, opened.adapter)


def text_of(opened: Open) -> tuple[object, ...]:
    """Return the properties that stay the same over a session's epochs while it has one text."""
    return (opened.max_length, opened.sampling)


def check_input(opened: Open, body: Input, start: int, accepted: int, hidden_size: int) -> ErrorCode | None:
    """Check an input from position `start` on in a session that has accepted `accepted` positions.

    Returns None if it fits; MALFORMED if its shape or dtype is wrong, it leaves a gap, or it has guesses of the client or
    too many; TOO_LARGE if it exceeds the
    reserved positions or requests too many outputs.
    """
    shape = body.tensor.shape
    ids = units_of(opened)[0] == 0
    fits = (
        len(shape) == (2 if ids else 3)
        and shape[0] == opened.rows
        and shape[1] > 0
        and (ids or shape[2] == hidden_size)
        and start <= accepted
        and body.tensor.dtype in (ID_DTYPES if ids else FLOAT_DTYPES)
        and (not body.reorder or (len(body.reorder) == opened.rows > max(body.reorder)))
        and (opened.index > 0 or (body.guessed, body.turn) == (0, 0))
        and body.guessed <= opened.drafts
    )
    if not fits:
        return ErrorCode.MALFORMED
    too_many = start + shape[1] > opened.max_length or (body.want == Want.ALL and shape[1] > MAX_WANTED_POSITIONS)
    return ErrorCode.TOO_LARGE if too_many else None


def pack_copy(copy: SessionCopy) -> tuple[CacheReply, list[Buffer]]:
    """Return a copy of a session as an answer to GET_CACHE, and its payload. 8-bit integers travel as UINT8."""
    tensors = {key: part.view(torch.uint8) if part.dtype == torch.int8 else part for key, part in copy.parts.items()}
    infos, payload = encode_values([part.contiguous() for part in tensors.values()])
    parts = [CachePart(layer, *key, info) for (layer, key), info in zip(tensors, infos, strict=True)]
    return CacheReply(copy.length, tuple(parts)), payload


def kinds_of(reply: CacheReply) -> dict[LayerState, TensorKind]:
    """Return the shapes and dtypes of the parts of a session's copy. Raises ProtocolError for a dtype that does not exist, or a
    compressed part."""
    if any(part.tensor.codec != Codec.NONE or part.tensor.dtype not in TORCH_DTYPE for part in reply.parts):
        raise ProtocolError("a part of a cache is compressed, or has an unknown dtype")
    dtypes = {**TORCH_DTYPE, int(DType.UINT8): torch.int8}
    return {(one.layer, (one.kind, one.index)): (one.tensor.shape, dtypes[one.tensor.dtype]) for one in reply.parts}


def unpack_copy(reply: CacheReply, payload: Buffer) -> SessionCopy:
    """Return the copy in an answer to GET_CACHE. Raises ProtocolError, with the name of the layer, if a number is not finite, or
    the payload is not as long as the parts."""
    tensors = decode_values([part.tensor for part in reply.parts], payload, "cpu")
    parts: States = {}
    for told, tensor in zip(reply.parts, tensors, strict=True):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ProtocolError(
                f"layer {told.layer}: the {told.kind} part has NaN or infinity", code=ErrorCode.NOT_FINITE
            )
        parts[told.layer, (told.kind, told.index)] = tensor.view(torch.int8) if tensor.dtype == torch.uint8 else tensor
    return SessionCopy(reply.length, parts)


def check_sampling(opened: Open, payload: Buffer, vocabulary: int) -> ErrorCode | None:
    """Check the sampling parameters of an OPEN, whose payload is the text before the next draw.

    Returns None if they are valid; MALFORMED if the text has the wrong length; INVALID_REQUEST if a token id is not in
    the vocabulary.
    """
    sampling = opened.sampling
    length = 0 if sampling is None else sampling.text_length(opened.known)
    if len(payload) != length * ID_BYTES:
        return ErrorCode.MALFORMED
    ids = [] if sampling is None else [*unpack_text(payload), *(token for token, _ in sampling.logit_bias)]
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        return ErrorCode.INVALID_REQUEST
    return None
