"""Settings by which the last hop draws tokens in RING mode, and the encodings of logprobs and of the text so far."""

from __future__ import annotations

import array
import math
import struct
import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Annotated, NamedTuple

from msgspec import Meta

from swarmnode.codec.body import MAX_POSITIONS, MAX_SEED, MAX_STOP_IDS, MAX_TEMPERATURE, Body, Code, TokenId
from swarmnode.errors import ProtocolError

MAX_PENALTY = 2.0  # of frequency_penalty and presence_penalty
MAX_REPETITION_PENALTY = 100.0  # and one over it at least
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 16384  # and as many bytes
ID_BYTES = 4  # of a token in a text so far

Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Bias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
_RECORD = struct.Struct("<if")
LOGPROB_BYTES = _RECORD.size


class TokenLogprob(NamedTuple):
    """A token's natural logarithm of its probability, as the model has it: before bias, penalties and temperature."""

    id: int
    logprob: float


def pack_logprobs(logprobs: Iterable[TokenLogprob]) -> bytes:
    """As they travel: int32 and float32, little-endian."""
    return b"".join(_RECORD.pack(*one) for one in logprobs)


def unpack_logprobs(payload: bytes | bytearray | memoryview) -> tuple[TokenLogprob, ...]:
    """Raises ProtocolError where these are none."""
    if len(payload) % LOGPROB_BYTES:
        raise ProtocolError(f"{len(payload)} bytes are no logarithms of probabilities")
    told = tuple(TokenLogprob(*record) for record in _RECORD.iter_unpack(payload))
    if not all(one.id >= 0 and math.isfinite(one.logprob) and one.logprob <= 0 for one in told):
        raise ProtocolError("logarithms of probabilities are finite and not over 0")
    return told


class GrammarKind(IntEnum):
    """How a grammar is written."""

    JSON_SCHEMA = 0
    LARK = 1
    REGEX = 2


class Grammar(Body, frozen=True):
    """What the generated text must follow, from its first token to its last."""

    kind: Code
    text: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class Sampling(Body, frozen=True):
    """`temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0, penalties of 0 and a `repetition_penalty` of 1 are off.

    The draw is a pure function of (logits, these parameters, row, position, the tokens before it), so that a replay draws the same.
    `frequency_penalty` and `presence_penalty` count the tokens that were drawn, `repetition_penalty` the prompt's, too.
    """

    prompt_length: Annotated[int, Meta(ge=1, le=MAX_POSITIONS)]
    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_POSITIONS)]
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: TokenId = 0
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] = 0
    stop_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_IDS)] = ()
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] = 1.0
    logit_bias: Annotated[tuple[tuple[TokenId, Bias], ...], Meta(max_length=MAX_BIASES)] = ()
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None  # of so many tokens beside the drawn one's
    grammar: Grammar | None = None

    @property
    def counts_prompt(self) -> bool:
        """Whether the last hop needs the prompt's token ids."""
        return self.repetition_penalty != 1

    @property
    def counts_tokens(self) -> bool:
        """Whether it needs those that were drawn before."""
        penalises = self.counts_prompt or self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalises or self.grammar is not None

    def text_length(self, known: int) -> int:
        """How many token ids come with an OPEN of a session whose outputs for positions below `known` the client has."""
        if not self.counts_tokens:
            return 0
        return self.prompt_length * self.counts_prompt + max(0, known - self.prompt_length)

    def check(self) -> None:
        ids = [token for token, _ in self.logit_bias]
        if len(set(ids)) < len(ids):
            raise ProtocolError("a token has one bias")
        if self.grammar is not None:
            if self.grammar.kind not in GrammarKind._value2member_map_:
                raise ProtocolError(f"a grammar of kind {self.grammar.kind}, which this version does not know")
            if len(self.grammar.text.encode()) > MAX_GRAMMAR_CHARS:
                raise ProtocolError(f"a grammar has at most {MAX_GRAMMAR_CHARS} bytes")


def pack_text(ids: Sequence[int]) -> bytes:
    """A text so far as it comes with an OPEN: int32, little-endian."""
    return _little_endian(array.array("i", ids)).tobytes()


def unpack_text(payload: bytes | bytearray | memoryview) -> list[int]:
    """The token ids of a text so far, of which there are whole ones."""
    return _little_endian(array.array("i", bytes(payload))).tolist()


def _little_endian(ids: array.array[int]) -> array.array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
