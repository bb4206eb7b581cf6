"""Settings for sampling at the last hop in RING mode, and the encodings of logprobs and of the earlier text."""

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
MAX_REPETITION_PENALTY = 100.0  # the least is one divided by it
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 16384  # the bound of its bytes, too
# of models that say nothing; many write nonsense at temperature 1
USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
ID_BYTES = 4  # of a token in the earlier text

Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Bias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
_RECORD = struct.Struct("<if")
LOGPROB_BYTES = _RECORD.size


class TokenLogprob(NamedTuple):
    """Token id and the natural logarithm of its probability from the model: before bias, penalties and temperature."""

    id: int
    logprob: float


def pack_logprobs(logprobs: Iterable[TokenLogprob]) -> bytes:
    """Return logprobs as bytes: int32 id and float32 value each, little-endian."""
    return b"".join(_RECORD.pack(*one) for one in logprobs)


def unpack_logprobs(payload: bytes | bytearray | memoryview) -> tuple[TokenLogprob, ...]:
    """Return the logprobs in the bytes. Raises ProtocolError if they are not valid."""
    if len(payload) % LOGPROB_BYTES:
        raise ProtocolError(
            f"{len(payload)} bytes are no whole number of log probabilities, which take {LOGPROB_BYTES} bytes each"
        )
    told = tuple(TokenLogprob(*record) for record in _RECORD.iter_unpack(payload))
    if not all(one.id >= 0 and math.isfinite(one.logprob) and one.logprob <= 0 for one in told):
        raise ProtocolError("logarithms of probabilities must be finite and at most 0")
    return told


class GrammarKind(IntEnum):
    """Notation of a grammar that constrains the drawn text."""

    JSON_SCHEMA = 0
    LARK = 1
    REGEX = 2


class Grammar(Body, frozen=True):
    """Grammar that the whole generated text must follow: its notation and its text."""

    kind: Code
    text: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class Sampling(Body, frozen=True):
    """Settings of sampling. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0, penalties of 0 and a `repetition_penalty`
    of 1 are off.

    The draw is a pure function of the logits, these settings, the row, the position and the tokens before it, so that a replay
    draws the same tokens. `frequency_penalty` and `presence_penalty` count drawn tokens, `repetition_penalty` the prompt's, too.
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
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None  # number of alternatives to the drawn token
    grammar: Grammar | None = None

    @property
    def counts_prompt(self) -> bool:
        """Whether the last hop needs the token ids of the prompt, as a repetition penalty does."""
        return self.repetition_penalty != 1

    @property
    def counts_tokens(self) -> bool:
        """Whether drawing a token depends on the tokens drawn before: by a penalty or a grammar."""
        penalises = self.counts_prompt or self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalises or self.grammar is not None

    def text_length(self, received_end: int) -> int:
        """Return the number of token ids in the payload of an OPEN of a client that has the outputs below
        `received_end`."""
        if not self.counts_tokens:
            return 0
        return self.prompt_length * self.counts_prompt + max(0, received_end - self.prompt_length)

    def check(self) -> None:
        ids = [token for token, _ in self.logit_bias]
        if len(set(ids)) < len(ids):
            raise ProtocolError("a token may have only one bias")
        if self.grammar is not None:
            if self.grammar.kind not in GrammarKind._value2member_map_:
                raise ProtocolError(f"a grammar has the kind {self.grammar.kind}, which this version does not know")
            if len(self.grammar.text.encode()) > MAX_GRAMMAR_CHARS:
                raise ProtocolError(f"a grammar may have at most {MAX_GRAMMAR_CHARS} bytes")


def pack_text(ids: Sequence[int]) -> bytes:
    """Return token ids as bytes for the payload of an OPEN: int32, little-endian."""
    return _little_endian(array.array("i", ids)).tobytes()


def unpack_text(payload: bytes | bytearray | memoryview) -> list[int]:
    """Return the token ids in the bytes, whose length must be a multiple of ID_BYTES."""
    return _little_endian(array.array("i", bytes(payload))).tolist()


def _little_endian(ids: array.array[int]) -> array.array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
