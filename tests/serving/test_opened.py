"""What comes with an OPEN must be what its sampling needs, no byte more or less."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Mode, Open
from swarmnode.codec.sampling import ID_BYTES, Sampling, pack_text
from swarmnode.errors import ErrorCode
from swarmnode.serving.drafting.lookup import MAX_TOKENS, TOKEN_BYTES
from swarmnode.serving.session.opening import check_sampling, journal_bytes

VOCABULARY = 100
PROMPT = [1, 2, 3]


def opened(known: int = 0, **fields: Any) -> Open:
    sampling = Sampling(len(PROMPT), 50, **fields)
    return Open(bytes(16), 1, (HopSpec("a", 0, 2),), 0, Mode.RING, 1, 60, sampling=sampling, known=known)


@pytest.mark.parametrize(
    ("fields", "known", "text"),
    [
        ({}, 20, []),
        ({"frequency_penalty": 1.0}, 0, []),
        ({"presence_penalty": 1.0}, 3, []),
        ({"presence_penalty": 1.0}, 5, [7, 8]),
        ({"repetition_penalty": 1.5}, 0, PROMPT),
        ({"repetition_penalty": 1.5}, 5, [*PROMPT, 7, 8]),
    ],
)
def test_the_text_so_far(fields: dict[str, Any], known: int, text: list[int]) -> None:
    body = opened(known, **fields)
    assert check_sampling(body, pack_text(text), VOCABULARY) is None
    for wrong in (pack_text([*text, 1]), pack_text(text)[:-1] or b"1", bytes(1 << 16)):
        assert check_sampling(body, wrong, VOCABULARY) == ErrorCode.MALFORMED
    if text:
        for foreign in (VOCABULARY, -1, -(1 << 31)):
            assert check_sampling(body, pack_text([*text[:-1], foreign]), VOCABULARY) == ErrorCode.INVALID_REQUEST


def test_biases_are_for_the_models_tokens() -> None:
    assert check_sampling(opened(logit_bias=((99, 1.0),)), b"", VOCABULARY) is None
    assert check_sampling(opened(logit_bias=((100, 1.0),)), b"", VOCABULARY) == ErrorCode.INVALID_REQUEST


def test_what_is_kept_of_a_text_is_reserved() -> None:
    plain = journal_bytes(opened(), 8)
    assert journal_bytes(opened(frequency_penalty=1.0), 8) == plain + 60 * 8
    assert journal_bytes(opened(logprobs=20), 8) == plain + 60 * 21 * 8


def test_the_text_to_look_guesses_up_in_is_counted_at_the_first_hop() -> None:
    plain = opened()
    guessing = msgspec.structs.replace(plain, drafts=8, proposer="lookup")
    assert journal_bytes(guessing, 8) == journal_bytes(plain, 8) + (TOKEN_BYTES + ID_BYTES) * plain.max_length
    long = msgspec.structs.replace(guessing, max_length=10 * MAX_TOKENS)
    more = journal_bytes(long, 8) - journal_bytes(msgspec.structs.replace(long, drafts=0), 8)
    assert more == (TOKEN_BYTES + 10 * ID_BYTES) * MAX_TOKENS, "the look-up forgets the older tokens"
